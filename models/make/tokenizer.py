"""The demo family's tokenizer: byte-level BPE of 4,096 tokens, made for Python source.

A line break and the following indentation stay together: "new line, eight spaces" is one token. Every byte string can
be encoded; encoding adds nothing (no BOS). Also encodes the corpus.
Run: `python -m models.make.tokenizer --help`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.training.data.corpus import read_documents
from outrider.training.errors import CorpusError

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
# Ids 0..4, in this order; the shipped configs name 0 (end of text) and 4 (end of turn) as stop ids.
SPECIAL_TOKENS = (END_OF_TEXT, "<|system|>", "<|user|>", "<|assistant|>", END_OF_TURN)
VOCAB_SIZE = 4096
# Line breaks with indentation | a word with one leading sign (" x", ".x", "_x") | 1-3 digits | signs | spaces.
SPLIT_PATTERN = r"(?:[ \t]*\r?\n)+[ \t]*|[^\s\p{L}\p{N}]?\p{L}+| \p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[ \t]+(?= )|\s+"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role must be system, user or assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
MAX_LENGTH = 2048


def train_tokenizer(documents: list[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Trains a byte-level BPE tokenizer of the special tokens, the 256 bytes and the learnt merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """Returns the content of `tokenizer_config.json`; plain data, so that reading it needs no transformers."""
    added = {
        str(token_id): {"content": token, "lstrip": False, "normalized": False, "rstrip": False}
        | {"single_word": False, "special": True}
        for token_id, token in enumerate(SPECIAL_TOKENS)
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }


def write_tokenizer(tokenizer: Tokenizer, model_dir: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`."""
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(model_dir / "tokenizer.json"), pretty=False)
    text = json.dumps(tokenizer_config(), indent=2) + "\n"
    (model_dir / "tokenizer_config.json").write_text(text, encoding="utf-8")


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Loads a finished model's tokenizer. Raises CorpusError when there is none."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise CorpusError(f"--model-dir {model_dir}: no tokenizer.json in it")
    return Tokenizer.from_file(str(path))


def write_token_ids(tokenizer: Tokenizer, work_dir: Path) -> dict[str, int]:
    """Encodes both splits to `{split}.bin` (uint16, end-of-text after every document); returns their lengths."""
    if tokenizer.get_vocab_size() > np.iinfo(np.uint16).max + 1:
        raise CorpusError(f"{tokenizer.get_vocab_size()} tokens do not fit uint16")
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    lengths = {}
    for split in ("train", "heldout"):
        rows = tokenizer.encode_batch(read_documents(work_dir, split), add_special_tokens=False)
        ids = np.concatenate([np.asarray([*row.ids, end_id], dtype=np.uint16) for row in rows])
        ids.tofile(work_dir / f"{split}.bin")
        lengths[split] = len(ids)
    return lengths


def main(
    work_dir: Annotated[Path, typer.Option(help="folder of the corpus")] = Path(".run/training"),
    out: Annotated[Path, typer.Option(help="folder for the tokenizer's files")] = Path(".run/training/tokenizer"),
    vocab_size: Annotated[int, typer.Option(help="number of tokens, special ones included")] = VOCAB_SIZE,
    model_dir: Annotated[Path | None, typer.Option(help="encode with this model's tokenizer, train none")] = None,
) -> None:
    """Train the tokenizer on the corpus and encode the corpus with it.

    Examples:

      python -m models.make.tokenizer --work-dir .run/training --out .run/training/tokenizer

      python -m models.make.tokenizer --model-dir models/demo-target     (to train further drafts for that
      target)
    """
    if model_dir is not None:
        tokenizer = load_tokenizer(model_dir)
    else:
        tokenizer = train_tokenizer(read_documents(work_dir, "train"), vocab_size)
        write_tokenizer(tokenizer, out)
    Console().print_json(data=write_token_ids(tokenizer, work_dir))


if __name__ == "__main__":
    typer.run(main)
