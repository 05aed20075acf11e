"""The digest says whether two tokenizers give the same ids; `tokenizers` is the oracle of what their ids are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from outrider.shared.checkpoint.tokenizer_digest import tokenizer_digest

MODELS = Path(__file__).parents[3] / "models"
WORDS = {"a": 0, "b": 1, "é\n": 2}


def saved(folder: Path, model: models.Model, *added: str) -> Path:
    folder.mkdir()
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_it_is_of_the_ids_and_tokens_whatever_the_format(tmp_path: Path) -> None:
    expected = hashlib.sha256(json.dumps([[0, "a"], [1, "b"], [2, "é\n"]]).encode()).hexdigest()
    word_level = saved(tmp_path / "1", models.WordLevel(dict(reversed(WORDS.items())), unk_token="a"))
    unigram = saved(tmp_path / "2", models.Unigram([(token, -1.0) for token in WORDS], 0))
    bpe = saved(tmp_path / "3", models.BPE(WORDS, []), "<chat>")
    assert {tokenizer_digest(folder) for folder in (word_level, unigram, bpe)} == {expected}
    other = saved(tmp_path / "4", models.BPE({"a": 0, "b": 2, "é\n": 1}, []))
    assert tokenizer_digest(other) not in ("", expected)


def test_the_demo_pair_agrees() -> None:
    assert tokenizer_digest(MODELS / "demo-draft") == tokenizer_digest(str(MODELS / "demo-target")) != ""


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": {}}}', "[" * 100_000])
def test_what_cannot_be_read_has_none(tmp_path: Path, text: str) -> None:
    assert tokenizer_digest(tmp_path) == ""
    (tmp_path / "tokenizer.json").write_text(text)
    assert tokenizer_digest(tmp_path) == ""
