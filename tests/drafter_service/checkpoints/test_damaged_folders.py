"""Folders that are no checkpoint: damaged, cut off, pickled, lying about their size. Typed errors, and no hanging."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafter_service.checkpoints.eagle3 import load_eagle3
from drafter_service.checkpoints.errors import CheckpointRefused
from drafter_service.checkpoints.recognise import recognise
from drafter_service.checkpoints.target_weights import TargetWeights, load_target_weights
from tests.drafter_service.checkpoints import plain_writer as plain


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


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": 1}))


def index(content: object) -> Callable[[Path], None]:
    return text("model.safetensors.index.json", json.dumps(content))


HUGE = {"fc.weight": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 2**62]}}
NEGATIVE = {"fc.weight": {"dtype": "F32", "shape": [-4, 4], "data_offsets": [0, 64]}}
LYING = {"fc.weight": {"dtype": "F32", "shape": [2**30], "data_offsets": [0, 64]}}

DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut off": (cut, "reading the safetensors header failed"),
    "empty": (text("model.safetensors", b""), "reading the safetensors header failed"),
    "a header longer than the file": (
        text("model.safetensors", struct.pack("<Q", 2**40) + b"{}"),
        "reading the safetensors header failed",
    ),
    "a header that is no JSON": (
        text("model.safetensors", struct.pack("<Q", 4) + b"\xff\xfe{{"),
        "reading the safetensors header failed",
    ),
    "a tensor larger than the file": (header(HUGE), "reading the safetensors header failed"),
    "a negative size": (header(NEGATIVE), "reading the safetensors header failed"),
    "a shape that is not its bytes": (header(LYING), "reading the safetensors header failed"),
    "a folder in place of the file": (
        lambda folder: ((folder / "model.safetensors").unlink(), (folder / "model.safetensors").mkdir())[1],
        "reading the safetensors header failed",
    ),
    "only a pickle": (only_a_pickle, r"pytorch_model.bin is a pickle.*Fix: convert it.*save_file\(torch.load"),
    "nothing": (lambda folder: (folder / "model.safetensors").unlink(), r"there is no \*.safetensors file"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: it cannot be read as JSON"),
    "a config that is a list": (text("config.json", "[1]"), "it holds a JSON list, not an object"),
    "a config that is no JSON": (text("config.json", "{"), "it cannot be read as JSON"),
    "a config that is no text": (text("config.json", b"\xff\xfe\x00"), "it cannot be read as JSON"),
    "a config nested without end": (text("config.json", "[" * 200_000), "it cannot be read as JSON"),
    "an index without a map": (index({"metadata": {}}), "it has no weight_map"),
    "an index to a file that is not there": (
        index({"weight_map": {"a": "b.safetensors"}}),
        "b.safetensors, which is not",
    ),
    "an index out of the folder": (index({"weight_map": {"a": "../b.safetensors"}}), "not a .* file beside it"),
    "an index of numbers": (index({"weight_map": {"a": 3}}), "weight_map names 3"),
    "the same tensor in two files": (
        lambda folder: (folder / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes()) and None,
        "is in model.safetensors and other.safetensors",
    ),
    "a tokenizer that is no object": (text("tokenizer.json", "3"), "it holds a JSON int, not an object"),
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
    with pytest.raises(CheckpointRefused, match="there is no such folder Fix: download"):
        load_eagle3(tmp_path / "nowhere", target, torch.float32)
    with pytest.raises(CheckpointRefused, match="there is no such folder"):
        load_target_weights(tmp_path / "nowhere")
