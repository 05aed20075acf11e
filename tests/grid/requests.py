"""What is asked of the model: sampling parameters by name, and prompts of real text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from outrider.shared.sampling_params import Grammar, GrammarKind, SamplingParams

NUM_TOKENS = 256
# Tokens of the text that each prompt begins with; the rest of it is what the model itself goes on with.
HEAD_LENGTHS = (15, 17, 19, 21, 23, 25)
GROWN_LENGTH = 40

# Goes on for longer than any test: 200 objects of at least five tokens each.
# Without the choice of white space: random weights would write nothing else.
_RECORDS = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 24}, "value": {"type": "integer"}},
        "required": ["name", "value"],
        "additionalProperties": False,
    },
}
_PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "t0.7": SamplingParams(temperature=0.7, seed=11),
    "t1.3": SamplingParams(temperature=1.3, seed=2**63 + 12),
    "top_p": SamplingParams(temperature=1.0, top_p=0.9, seed=13),
    "penalties": SamplingParams(
        temperature=0.8, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.15, seed=14
    ),
    # Greedy, so that an edited law without randomness is there as well.
    "grammar": SamplingParams(temperature=0.0, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(_RECORDS))),
}

PARAMS: dict[str, SamplingParams] = {
    name: replace(params, max_tokens=NUM_TOKENS, ignore_eos=True) for name, params in _PARAMS.items()
}

# Code that repeats itself, so that an n-gram drafter finds something.
_TEXTS = (
    "def read_lines(path):\n    with open(path) as handle:\n        return handle.read().splitlines()\n\n\ndef ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items",
    "import os\nimport sys\n\n\ndef main(argv):\n    for name in argv[1:]:\n        print(os.path.abspath(name))\n",
    "for row in rows:\n    for cell in row:\n        total += cell\n        count += 1\nmean = total / count\nprint(",
    "def test_add():\n    assert add(1, 2) == 3\n    assert add(2, 2) == 4\n\n\ndef test_sub():\n    assert sub(2, 1",
    'records = json.loads(text)\nfor record in records:\n    print(record["name"], record["value"], record["total"])\n',
)


def prompt_heads(tokenizer_folder: Path) -> dict[str, tuple[int, ...]]:
    """Parameters' name -> the first tokens of its prompt."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    heads = {}
    for name, text, length in zip(PARAMS, _TEXTS, HEAD_LENGTHS, strict=True):
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(token_ids) < length:
            raise ValueError(f"the text for {name} has {len(token_ids)} tokens, {length} are wanted")
        heads[name] = tuple(token_ids[:length])
    return heads
