"""Rank 0: starts the other ranks as child processes, announces every forward, ends the process if a rank is lost.

    loaded = load_sharded(LoadSpec("models/target", ...), size=2)
    runner = ModelRunner(loaded, loaded.make_cache(num_blocks=256))     # as on one process

Not here: the other side (follower). All ranks are on one machine.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import itertools
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, get_context
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from outrider.engine.attention.batch import ForwardBatch
from outrider.engine.attention.paged_kv import PagedKVCache
from outrider.engine.errors import BackendUnavailable, EngineError
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.tensor_parallel.collectives import Collectives
from outrider.engine.tensor_parallel.follower import follow
from outrider.engine.tensor_parallel.protocol import DropCache, Forward, LoadSpec, MakeCache, Message, Move, Stop
from outrider.engine.tensor_parallel.rank_processes import RankProcesses
from outrider.engine.tensor_parallel.shard import Shard

log = logging.getLogger(__name__)
_DEATH_NOTICE_S = 1.0  # seconds; wait after a broken pipe or collective for the kernel to report the rank's end
_STOP_TIMEOUT_S = 5.0  # seconds; wait for a rank to end before it is killed


def end_process(cause: str) -> None:
    """Ends this process now: the engine's thread may be waiting in a collective for a lost rank."""
    log.critical("%s; ending the service", cause)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(1)


class Leader:
    """Rank 0's handle on the other ranks. Announcements must come from one thread at a time, like forwards."""

    def __init__(self, spec: LoadSpec, size: int, on_failure: Callable[[str], None]) -> None:
        """Starts ranks 1 to size - 1. on_failure: called on any thread; serving must not continue after it."""
        if dist.is_initialized():
            raise EngineError("this process holds a rank already: one tensor-parallel model per process")
        if spec.device != "cpu" and 0 < torch.cuda.device_count() < size:
            raise BackendUnavailable(f"{size} tensor-parallel ranks need as many GPUs, not {torch.cuda.device_count()}")
        self._on_failure = on_failure
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._cache_ids = itertools.count()
        self._dropped: deque[int] = deque()
        self._closing = threading.Event()
        self._pipes: list[connection.Connection] = []
        processes: list[SpawnProcess] = []
        context = get_context("spawn")  # not fork: torch's and gRPC's threads do not survive it
        for rank in range(1, size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=follow, args=(theirs, spec, rank, size, self._store.port), name=f"rank-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            processes.append(process)
        self._ranks = RankProcesses(processes)
        atexit.register(self.close)  # runs before multiprocessing's own, which would wait for ranks that wait for us
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()
        try:
            self.collectives = Collectives(self._store, 0, size, spec.device)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1 and up."""
        return self._ranks.pids

    def close(self) -> None:
        """Stops the other ranks and waits until they have ended; may be called again."""
        if self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        for pipe in self._pipes:
            try:
                pipe.send(Stop())
            except OSError:
                continue  # it has ended already
        self._ranks.stop(_STOP_TIMEOUT_S)
        if dist.is_initialized():
            self.collectives.leave()

    def make_cache(self, *args: Any, **kwargs: Any) -> MirroredKVCache:
        """Makes a PagedKVCache here and one on every other rank, which live as long as ours."""
        cache_id = next(self._cache_ids)
        cache = MirroredKVCache(self, cache_id, *args, **kwargs)
        self.announce(MakeCache(cache_id, cache.num_blocks, cache.block_size))
        # Queued only: the garbage collector may run while another announcement is half sent.
        weakref.finalize(cache, self._dropped.append, cache_id)
        return cache

    @contextmanager
    def in_step(self, cache: PagedKVCache, batch: ForwardBatch) -> Iterator[None]:
        """Runs this forward on the other ranks too. If ours fails, the ranks cannot be synchronised again."""
        if not isinstance(cache, MirroredKVCache):
            raise TypeError("a tensor-parallel model runs on caches of its own make_cache")
        self.announce(Forward.of(cache.cache_id, batch))
        try:
            yield
        except Exception as error:
            self._fail(f"rank 0 failed within a tensor-parallel forward: {error}")
            raise

    def announce(self, message: Message) -> None:
        while self._dropped:
            self._send(DropCache(self._dropped.popleft()))
        self._send(message)

    def _send(self, message: Message) -> None:
        for rank, pipe in enumerate(self._pipes, start=1):
            try:
                pipe.send(message)
            except OSError as error:
                self._fail(f"tensor-parallel rank {rank} no longer listens: {error}")
                raise

    def _fail(self, symptom: str) -> None:
        """Reports a failed step. A dead rank is its usual cause, and is what the reader must learn."""
        self._on_failure(self._ranks.death(_DEATH_NOTICE_S) or symptom)

    def _watch(self) -> None:
        death = self._ranks.death(timeout_s=None)
        if death and not self._closing.is_set():
            self._on_failure(death)


class MirroredKVCache(PagedKVCache):
    """Rank 0's share of a cache that is split over the ranks."""

    def __init__(self, leader: Leader, cache_id: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache_id = cache_id
        self._leader = leader

    def move(self, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
        if source_slots.numel():
            self._leader.announce(Move(self.cache_id, source_slots.cpu().numpy(), target_slots.cpu().numpy()))
        super().move(source_slots, target_slots)


def load_sharded(
    spec: LoadSpec,
    size: int,
    *,
    on_progress: Callable[[str], None] | None = None,
    on_failure: Callable[[str], None] = end_process,
) -> LoadedModel:
    """Loads the model on `size` ranks, of which this process is rank 0; loaded.close() ends the others.

    spec.num_threads: of all ranks together. Raises as load_model does.
    """
    if size == 1:
        return load_model(**dataclasses.asdict(spec), on_progress=on_progress)
    spec = dataclasses.replace(spec, num_threads=max(1, spec.num_threads // size))
    leader = Leader(spec, size, on_failure)
    try:
        cut = functools.partial(Shard, collectives=leader.collectives)
        loaded = load_model(**dataclasses.asdict(spec), on_progress=on_progress, cut=cut)
    except BaseException:
        leader.close()
        raise
    return dataclasses.replace(loaded, leader=leader)
