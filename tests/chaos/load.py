"""What is asked for, once undisturbed and then again in trouble, and how the two are compared.

Not here: the trouble (storm.py, faults.py, scaling.py).
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.client import Choice, Received, Refused, fetch

PROMPTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):",
    "for name in names:\n    print(name)\nfor name in",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
)
_SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 6}},
    "required": ["names"],
}
_NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string", "pattern": "^[a-z ]{60,90}$"}},
    "required": ["text"],
    "additionalProperties": False,
}
_STYLE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
# A call behind free text, which the prompt alone would not make the demo model write.
_TEXT_AND_CALL = (
    'start: /[a-z ,.]{20,40}/ "\\n<tool_call>\\n{\\"name\\": \\"note\\", \\"arguments\\": " args "}\\n</tool_call>"\n'
    f"args: %json {json.dumps({**_NOTE, **_STYLE})}"
)
_TOOLS = {
    "tools": [{"type": "function", "function": {"name": name, "parameters": _NOTE}} for name in ("note", "write")],
    "parallel_tool_calls": False,
}
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.1, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.3},
)
# With what a failover must carry over besides tokens: a grammar's position, the other choices, log-probabilities, the
# text that may begin a stop string, the tool call whose arguments are half sent.
CASES: tuple[dict[str, Any], ...] = (
    *PARAMS,
    {"temperature": 0.8, "seed": 7, "structured_outputs": {"regex": "([a-f]{3}-[0-9]{2}[,;] ?){4,40}"}},
    {"temperature": 0.9, "seed": 8, "structured_outputs": {"json": _SCHEMA}, "logprobs": 1},
    {"temperature": 0.9, "seed": 9, "n": 2},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.8, "seed": 10, "stop": ["\n\n", "self."]},
    {"temperature": 0.9, "seed": 11, "n": 2, "logprobs": 1, "stop": [")\n"], "include_stop_str_in_output": True},
    {"temperature": 0, **_TOOLS, "tool_choice": "required"},
    {"temperature": 0.8, "seed": 12, **_TOOLS, "structured_outputs": {"grammar": _TEXT_AND_CALL}},
)
METHODS = ("draft_model", "ngram", "suffix", "auto", "off")
_DEADLINE_S = 600.0


@dataclass
class Report:
    num_requests: int = 0
    mismatches: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_reconnects: int = 0
    stalls_s: list[float] = field(default_factory=list)
    misfortunes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    leftovers: list[str] = field(default_factory=list)

    def stall_s(self, quantile: float) -> float:
        """Of the longest pause between two events of each request."""
        if len(self.stalls_s) < 2:
            return max(self.stalls_s, default=0.0)
        return statistics.quantiles(self.stalls_s, n=1000, method="inclusive")[min(998, int(quantile * 1000) - 1)]


@dataclass(frozen=True)
class Load:
    num_requests: int
    num_at_once: int
    num_tokens: int
    mean_pause_s: float
    seed: int
    methods: tuple[str, ...] = METHODS


def request_body(index: int, load: Load, method: str) -> dict[str, Any]:
    prompt, case = PROMPTS[index % len(PROMPTS)], CASES[index // len(PROMPTS) % len(CASES)]
    asked = {"messages": [{"role": "user", "content": prompt}]} if "tools" in case else {"prompt": prompt}
    return {
        **asked,
        **case,
        "max_tokens": load.num_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "speculation": {"method": method, "num_speculative_tokens": 1 + index % 5},
    }


async def fetch_references(urls: Sequence[str], load: Load) -> list[Received]:
    count = len(PROMPTS) * len(CASES)
    rng = random.Random(0)
    return await asyncio.gather(
        *(
            fetch(urls, f"reference-{load.seed}-{index}", request_body(index, load, "off"), rng, 300.0)
            for index in range(count)
        )
    )


async def compared_request(
    urls: Sequence[str], load: Load, index: int, references: Sequence[Received], report: Report
) -> None:
    """One request in trouble; what is wrong with its answer goes into the report."""
    rng = random.Random(load.seed * 1_000_003 + index)
    body = request_body(index, load, load.methods[rng.randrange(len(load.methods))])
    if rng.random() < 0.5:
        body["speculation"]["token_tree"] = True
    expected = references[index % len(references)]
    try:
        received = await fetch(urls, f"chaos-{load.seed}-{index}", body, rng, _DEADLINE_S)
    except TimeoutError:
        report.failures.append(f"request {index}: no end within {_DEADLINE_S:g} s")
        return
    except Refused as refusal:
        report.failures.append(f"request {index}: {refusal}")
        return
    report.num_reconnects += received.num_reconnects
    report.stalls_s.append(max(received.stalls_s, default=0.0))
    for choice, wanted in expected.choices.items():
        found = received.choices.get(choice, Choice())
        if found != wanted:
            report.mismatches.append(
                f"request {index}, choice {choice}: {_difference(wanted, found)}; {received.problems[-2:]}"
            )


def _difference(wanted: Choice, found: Choice) -> str:
    pairs = zip(wanted.token_ids, found.token_ids, strict=False)
    place = next((index for index, (one, other) in enumerate(pairs) if one != other), -1)
    fields = [name for name in vars(wanted) if getattr(wanted, name) != getattr(found, name)]
    return (
        f"{', '.join(fields)}: {len(found.token_ids)} of {len(wanted.token_ids)} tokens, first difference at {place}, "
        f"finish {found.finish_reason}"
    )
