"""A rank other than 0: loads its share, then runs the forwards that rank 0 announces, until stopped.

It ends with its parent process. Not here: starting it and noticing its death (leader).
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import asdict
from functools import partial
from multiprocessing import connection, parent_process

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from outrider.engine.attention.paged_kv import PagedKVCache
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from outrider.engine.tensor_parallel.collectives import Collectives
from outrider.engine.tensor_parallel.protocol import DropCache, Forward, LoadSpec, MakeCache, Message, Move, Stop
from outrider.engine.tensor_parallel.shard import Shard
from outrider.shared.errors import OutriderError

# seconds; wait for rank 0's Stop after a refusal; all ranks refuse the same model, and rank 0 must report it first
_REFUSAL_GRACE_S = 5.0


def follow(pipe: connection.Connection, spec: LoadSpec, rank: int, size: int, store_port: int) -> None:
    """Runs the rank's process, as its main function. An exception makes its exit code non-zero."""
    # Rank 0 handles signals to the process group: it drains, then sends Stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    store = TCPStore("127.0.0.1", store_port, is_master=False)
    collectives = Collectives(store, rank, size, spec.device)
    try:
        loaded = load_model(**asdict(spec), cut=partial(Shard, collectives=collectives))
    except OutriderError:
        if pipe.poll(_REFUSAL_GRACE_S):
            return  # rank 0 has sent Stop
        raise
    _run(pipe, loaded)
    collectives.leave()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)  # the main thread may be inside a collective that never ends


def _run(pipe: connection.Connection, loaded: LoadedModel) -> None:
    runners: dict[int, ModelRunner] = {}
    while True:
        message: Message = pipe.recv()
        match message:
            case Forward():
                runners[message.cache_id].forward(message.batch(loaded.device))
            case Move():
                _move(runners[message.cache_id].cache, message, loaded.device)
            case MakeCache():
                cache = loaded.make_cache(message.num_blocks, message.block_size)
                runners[message.cache_id] = ModelRunner(loaded, cache)
            case DropCache():
                del runners[message.cache_id]
            case Stop():
                return


def _move(cache: PagedKVCache, message: Move, device: torch.device) -> None:
    cache.move(torch.from_numpy(message.source_slots).to(device), torch.from_numpy(message.target_slots).to(device))
