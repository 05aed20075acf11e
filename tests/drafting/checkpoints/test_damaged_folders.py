"""Folders that are no checkpoint: damaged, cut off, pickled, lying about their size. Typed errors, and no hanging."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.drafting.checkpoints.eagle3 import load_eagle3
from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.recognise import recognise
from outrider.drafting.checkpoints.target_weights import TargetWeights, load_target_weights
from tests.drafting.checkpoints import plain_writer as plain


class Runs:
    """What a pickle of it does when it is loaded freely: the test fails."""

    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise AssertionError('it ran')",)


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def header(entries: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        text = json.dumps(entries).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))

    return write


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def pickled(content: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(content, folder / "pytorch_model.bin")

    return write


def index(content: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "other.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return write


def twice(folder: Path) -> None:
    file = folder / "model.safetensors"
    (folder / "one.safetensors").write_bytes(file.read_bytes())
    file.rename(folder / "other.safetensors")


HUGE = {"fc.weight": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 2**62]}}
NEGATIVE = {"fc.weight": {"dtype": "F32", "shape": [-4, 4], "data_offsets": [0, 64]}}
LYING = {"fc.weight": {"dtype": "F32", "shape": [2**30], "data_offsets": [0, 64]}}

DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut off": (cut, "model.safetensors cannot be read"),
    "empty": (text("model.safetensors", b""), "model.safetensors cannot be read"),
    "a header longer than the file": (
        text("model.safetensors", struct.pack("<Q", 2**40) + b"{}"),
        "model.safetensors cannot be read",
    ),
    "a header that is no JSON": (
        text("model.safetensors", struct.pack("<Q", 4) + b"\xff\xfe{{"),
        "model.safetensors cannot be read",
    ),
    "a tensor larger than the file": (header(HUGE), "model.safetensors cannot be read"),
    "a negative size": (header(NEGATIVE), "model.safetensors cannot be read"),
    "a shape that is not its bytes": (header(LYING), "model.safetensors cannot be read"),
    "a folder in place of the file": (
        lambda folder: ((folder / "model.safetensors").unlink(), (folder / "model.safetensors").mkdir())[1],
        "model.safetensors cannot be read",
    ),
    "a pickle of a number": (pickled({"fc.weight": 1}), "pytorch_model.bin is more than .* 'fc.weight' is a int"),
    "a pickle that would run": (pickled({"fc.weight": Runs()}), "it names exec, which is not run"),
    "nothing": (lambda folder: (folder / "model.safetensors").unlink(), r"it has neither \*.safetensors nor"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: it cannot be read as JSON"),
    "a config that is a list": (text("config.json", "[1]"), "it is a JSON list, not an object"),
    "a config that is no JSON": (text("config.json", "{"), "it cannot be read as JSON"),
    "a config that is no text": (text("config.json", b"\xff\xfe\x00"), "it cannot be read as JSON"),
    "a config nested without end": (text("config.json", "[" * 200_000), "it cannot be read as JSON"),
    "an index without a map": (index({"metadata": {}}), "index.json cannot be read: KeyError"),
    "an index to a file that is not there": (
        index({"weight_map": {"a": "b.safetensors"}}),
        "b.safetensors, which is not there",
    ),
    "an index out of the folder": (index({"weight_map": {"a": "../b.safetensors"}}), "not a .* file in the folder"),
    "an index of numbers": (index({"weight_map": {"a": 3}}), "index.json names 3, not a"),
    "the same tensor in two files": (twice, "is in one.safetensors and other.safetensors"),
    "a tokenizer that is no object": (text("tokenizer.json", "3"), "it is a JSON int, not an object"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_head_is_refused(damage: str, target: TargetWeights, tmp_path: Path) -> None:
    spoil, message = DAMAGES[damage]
    folder = plain.write(tmp_path, plain.eagle3_config(), plain.eagle3_tensors())
    spoil(folder)
    with pytest.raises(CheckpointRefused, match=message):
        load_eagle3(folder, target, torch.float32)
    if not damage.startswith("a tokenizer"):
        with pytest.raises(CheckpointRefused, match=message):
            recognise(folder)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_target_is_refused(damage: str, tmp_path: Path) -> None:
    folder = plain.write(tmp_path, plain.llama_config(), plain.target_tensors())
    DAMAGES[damage][0](folder)
    with pytest.raises(CheckpointRefused):
        load_target_weights(folder)


def test_no_folder(target: TargetWeights, tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused, match="the folder does not exist Fix: download"):
        load_eagle3(tmp_path / "nowhere", target, torch.float32)
    with pytest.raises(CheckpointRefused, match="the folder does not exist"):
        load_target_weights(tmp_path / "nowhere")
