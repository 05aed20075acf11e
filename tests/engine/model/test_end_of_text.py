"""Which tokens end a text, where a checkpoint's files do not agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tiny_models import SERVED, save_tiny_model
from tokenizers.models import WordLevel

from outrider.drafting.vocabulary.mapping import ModelIds
from outrider.engine.errors import ModelRefused
from outrider.engine.model.load import load_model

TOKENIZER_EOS = 9


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """generation_config.json names 7, config.json 2, and the tokenizer 9."""
    folder = save_tiny_model(*SERVED["llama"], tmp_path / "llama")
    write(folder, "generation_config.json", eos_token_id=7)
    vocabulary = {f"t{token_id}": token_id for token_id in range(101)}
    tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="t0")).save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", eos_token=f"t{TOKENIZER_EOS}")
    return folder


def write(folder: Path, name: str, **content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def edit(folder: Path, name: str, **changes: Any) -> None:
    write(folder, name, **json.loads((folder / name).read_text()) | changes)


def test_every_file_has_its_say(llama: Path) -> None:
    assert load_model(str(llama)).eos_token_ids == (7, 2, TOKENIZER_EOS)
    assert ModelIds.read(str(llama)).eos_token_ids == (7, 2, TOKENIZER_EOS)


@pytest.mark.parametrize(
    ("file", "changes", "expected"),
    [
        ("generation_config.json", {"eos_token_id": [2, 7, 9]}, (2, 7, 9)),
        ("generation_config.json", {"eos_token_id": None}, (2, 9)),
        ("config.json", {"eos_token_id": [3, 2]}, (7, 3, 2, 9)),
        ("config.json", {"eos_token_id": -1}, (7, 9)),
        ("config.json", {"eos_token_id": None}, (7, 9)),
        ("tokenizer_config.json", {"eos_token": {"content": "t8"}}, (7, 2, 8)),
        ("tokenizer_config.json", {"eos_token": "not a token"}, (7, 2)),
    ],
)
def test_one_file_changes(llama: Path, file: str, changes: dict[str, Any], expected: tuple[int, ...]) -> None:
    edit(llama, file, **changes)
    assert ModelIds.read(str(llama)).eos_token_ids == expected


def test_the_default_of_the_config_class_stands_where_no_file_names_one(llama: Path) -> None:
    """LlamaConfig's is 2."""
    config = json.loads((llama / "config.json").read_text())
    del config["eos_token_id"]
    write(llama, "config.json", **config)
    assert ModelIds.read(str(llama)).eos_token_ids == (7, TOKENIZER_EOS)
    for name in ("generation_config.json", "tokenizer_config.json"):
        (llama / name).unlink()
    assert ModelIds.read(str(llama)).eos_token_ids == (2,)


def test_a_checkpoint_without_an_end(llama: Path) -> None:
    edit(llama, "config.json", eos_token_id=None)
    for name in ("generation_config.json", "tokenizer_config.json"):
        (llama / name).unlink()
    assert ModelIds.read(str(llama)).eos_token_ids == ()


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("generation_config.json", "{", "generation_config.json cannot be read as JSON"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', r"eos_token_id must be a token id or a list of them"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
    ],
)
def test_a_broken_file_is_named(llama: Path, file: str, text: str, said: str) -> None:
    (llama / file).write_text(text)
    with pytest.raises(ModelRefused, match=said):
        ModelIds.read(str(llama))
