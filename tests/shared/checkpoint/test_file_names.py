"""Which files of a folder are read: as transformers chooses them, and nothing out of the folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.shared.checkpoint.file_names import older_tokenizer, weight_files
from outrider.shared.errors import ConfigError

SHARDS = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]


def fill(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / name).write_text("{}")


@pytest.mark.parametrize(
    ("there", "read"),
    [
        (["model.safetensors", "other.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["medusa_lm_head.safetensors", "pytorch_model.bin"], ["medusa_lm_head.safetensors"]),
        (["pytorch_model.bin", "training_args.bin", "optimizer.pt"], ["pytorch_model.bin"]),
        ([*SHARDS, "training_args.bin"], SHARDS),
    ],
)
def test_the_first_kind_that_is_there(tmp_path: Path, there: list[str], read: list[str]) -> None:
    fill(tmp_path, there)
    assert [file.name for file in weight_files(tmp_path)] == read


def test_an_index_says_which(tmp_path: Path) -> None:
    fill(tmp_path, [*SHARDS, "pytorch_model-other.bin"])
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"b": SHARDS[1], "a": SHARDS[0], "c": SHARDS[1]}}))
    assert [file.name for file in weight_files(tmp_path)] == SHARDS
    for name, message in [
        ("../weights.bin", "not a .* file in the folder"),
        ("model.safetensors", "not a .*bin file in the folder"),
        ("pytorch_model-3.bin", "which is not there; download it again"),
    ]:
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ConfigError, match=message):
            weight_files(tmp_path)


@pytest.mark.parametrize(
    ("there", "older"),
    [
        (["vocab.json", "merges.txt", "tokenizer.model"], ("vocab.json", "merges.txt")),
        (["vocab.json", "tokenizer.model"], ("tokenizer.model",)),
        (["vocab.json", "merges.txt", "tokenizer.json"], ()),
        (["vocab.json"], ()),
    ],
)
def test_tokenizers_to_convert(tmp_path: Path, there: list[str], older: tuple[str, ...]) -> None:
    fill(tmp_path, there)
    assert older_tokenizer(tmp_path) == older
