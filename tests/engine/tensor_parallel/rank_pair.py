"""One checkpoint loaded twice: on this process, and on this process and another one.

The other rank comes from a fork server that has imported torch once: a rank that is spawned, as in the service
(tests/verifier_service/test_tensor_parallel.py), imports it for 7 s of processor time.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pytest

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ForwardResult, ModelRunner
from outrider.engine.tensor_parallel import leader
from outrider.engine.tensor_parallel.leader import load_sharded
from outrider.engine.tensor_parallel.protocol import LoadSpec


@dataclass
class Pair:
    """One model on one process and on two; what the two report as their end."""

    alone: LoadedModel
    together: LoadedModel
    failures: queue.Queue[str]


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Within it the ranks of this process are forked from a server instead of spawned."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["outrider.engine.tensor_parallel.follower"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leader, "get_context", lambda _method: context)
        yield


def load_pair(path: Path, dtype: str) -> Pair:
    failures: queue.Queue[str] = queue.Queue()
    spec = LoadSpec(str(path), dtype, "cpu", "auto", None, num_threads=2)
    alone = load_model(str(path), dtype=dtype)
    return Pair(alone, load_sharded(spec, 2, on_failure=failures.put), failures)


def forward(loaded: LoadedModel, token_ids: list[int], taps: tuple[int, ...] = ()) -> ForwardResult:
    runner = ModelRunner(loaded, loaded.make_cache(8, 16))
    rows = SessionRows(token_ids, 0, list(range(8)), len(token_ids))
    return runner.forward(build_batch([rows], 16), taps)
