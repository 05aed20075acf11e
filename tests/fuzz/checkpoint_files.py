"""Checkpoint folders with changed configs, changed tensors, broken bytes: a head is loaded, or CheckpointRefused.

Not here: what a changed checkpoint is (tests/drafting/checkpoints/test_fuzz.py, whose strategies these are).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.recognise import KINDS, recognise
from outrider.drafting.checkpoints.target_weights import TargetWeights, load_target_weights
from tests.drafting.checkpoints import plain_writer as plain
from tests.drafting.checkpoints.test_fuzz import STARTS, changed
from tests.fuzz.campaign import Target
from tests.fuzz.strange_bytes import corrupted
from tests.fuzz.tally import Finding

Load = Callable[[Path], object]


@contextmanager
def checkpoint_targets() -> Iterator[list[Target[Any]]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain.write(folder / "target", plain.llama_config(), plain.target_tensors())
        target = load_target_weights(folder / "target", torch.float32)
        yield [
            *(_changed_target(start, folder / "changed", target) for start in STARTS),
            *(_bytes_target(start, folder / "bytes", target) for start in STARTS),
            _changed_model(folder / "changed"),
        ]


def _changed_target(start: str, folder: Path, target: TargetWeights) -> Target[Any]:
    load, config, tensors = STARTS[start]

    def check(one: tuple[Any, plain.Tensors]) -> list[str]:
        shutil.rmtree(folder, ignore_errors=True)
        plain.write(folder, *one)
        return [_outcome(folder, lambda path: load(path, target, torch.float32))]

    return Target(f"checkpoint {start}, changed", changed(config, tensors), check)


def _bytes_target(start: str, folder: Path, target: TargetWeights) -> Target[Any]:
    """Broken bytes in one of the two files; in the tensors' file mostly where its header is."""
    load, config, tensors = STARTS[start]
    plain.write(folder / "good", config, tensors)
    weights = (folder / "good" / "model.safetensors").read_bytes()
    head = 8 + int.from_bytes(weights[:8], "little")
    text = json.dumps(config).encode()

    def check(one: tuple[bytes, bytes]) -> list[str]:
        path = folder / "broken"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_bytes(one[0])
        (path / "model.safetensors").write_bytes(one[1])
        return [_outcome(path, lambda path: load(path, target, torch.float32))]

    broken = corrupted(st.just(weights[:head])).map(lambda header: header + weights[head:])
    inputs = st.one_of(
        st.tuples(corrupted(st.just(text)), st.just(weights)),
        st.tuples(st.just(text), broken),
        st.tuples(st.just(text), corrupted(st.just(weights))),
    )
    return Target(f"checkpoint {start}, broken bytes", inputs, check)


def _changed_model(folder: Path) -> Target[Any]:
    def check(one: tuple[Any, plain.Tensors]) -> list[str]:
        shutil.rmtree(folder, ignore_errors=True)
        plain.write(folder, *one)
        return [_outcome(folder, load_target_weights)]

    return Target("checkpoint target, changed", changed(plain.llama_config(), plain.target_tensors()), check)


def _outcome(folder: Path, load: Load) -> str:
    try:
        if recognise(folder) not in KINDS:
            raise Finding("recognised as a kind that there is not")
        recognised = "recognised"
    except CheckpointRefused:
        recognised = "unknown"
    try:
        load(folder)
    except CheckpointRefused:
        return f"{recognised}, refused"
    return f"{recognised}, loaded"
