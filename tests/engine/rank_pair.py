"""One checkpoint loaded twice: on this process, and on this process and another one."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from pathlib import Path

from engine.batch import SessionRows, build_batch
from engine.model import LoadedModel, load_model
from engine.runner import ForwardResult, ModelRunner
from engine.tensor_parallel.leader import load_sharded
from engine.tensor_parallel.protocol import LoadSpec


@dataclass
class Pair:
    """One model on one process and on two; what the two report as their end."""

    alone: LoadedModel
    together: LoadedModel
    failures: queue.Queue[str]


def load_pair(path: Path, dtype: str) -> Pair:
    failures: queue.Queue[str] = queue.Queue()
    spec = LoadSpec(str(path), dtype, "cpu", "auto", None, num_threads=2)
    alone = load_model(str(path), dtype=dtype)
    return Pair(alone, load_sharded(spec, 2, on_failure=failures.put), failures)


def forward(loaded: LoadedModel, token_ids: list[int], taps: tuple[int, ...] = ()) -> ForwardResult:
    runner = ModelRunner(loaded, loaded.make_cache(8, 16))
    rows = SessionRows(token_ids, 0, list(range(8)), len(token_ids))
    return runner.forward(build_batch([rows], 16), taps)
