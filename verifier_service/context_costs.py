"""What a forward costs by the contexts that its rows attend to: measured once, at start.

Attention reads every session's keys and values, whatever the number of its rows, and computes with them for each row:
16 sessions of 300 tokens take 11 ms beyond the 12 of their 16 rows, with four rows each 13 beyond 24 (two cores, a
target of 162 M parameters). Where that is not known, sessions that come and go make rows look dear (StepCosts): the
price of a draft rose by half within a second of 16 sessions.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from engine.batch import ForwardBatch, SessionRows, build_batch
from engine.cpu_graphs import MEETINGS_BEFORE_RECORDING
from engine.runner import ModelRunner
from verifier_service.scheduler import Work

_MOST_SESSIONS, _FEW_ROWS, _MANY_ROWS = 16, 1, 4
_CONTEXT_LEN = 256
_REPEATS = 5
# For all of it: nothing is known where one turn of a large model takes as long.
_BUDGET_S = 4.0


class Contexts(NamedTuple):
    """What a forward attends to: cached tokens of all its sessions, and the same once for every row of a session."""

    num_tokens: int = 0
    num_pairs: int = 0

    @classmethod
    def of(cls, plan: Iterable[Work]) -> Self:
        """Before the forward. Prompts count as one row: their many rows share what they read."""
        rows = [(work.session.num_computed, work.num_rows if work.num_chain_rows == 1 else 1) for work in plan]
        return cls(sum(length for length, _ in rows), sum(length * num_rows for length, num_rows in rows))


NO_CONTEXTS = Contexts()


@dataclass(frozen=True)
class ContextCosts:
    """Seconds for each cached token of a session in the forward, and for each such token and row."""

    token_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, contexts: Contexts) -> float:
        return self.token_s * contexts.num_tokens + self.pair_s * contexts.num_pairs


def measure_context_costs(runner: ModelRunner, num_blocks: int, block_size: int) -> ContextCosts:
    """Forwards with contexts and without, of one row and of several each, in turn; before anybody is served. Nothing
    is known where the cache is too small for it or a forward takes too long."""
    num_blocks_each = -(-(_CONTEXT_LEN + _MANY_ROWS) // block_size)
    num_sessions = min(_MOST_SESSIONS, num_blocks // num_blocks_each)
    if num_sessions == 0 or runner.loaded.max_model_len < _CONTEXT_LEN + _MANY_ROWS:
        return ContextCosts()
    seconds: dict[tuple[int, int], list[float]] = {}
    blocks = [list(range(place * num_blocks_each, (place + 1) * num_blocks_each)) for place in range(num_sessions)]
    cases = list(itertools.product((_FEW_ROWS, _MANY_ROWS), (0, _CONTEXT_LEN)))
    deadline = time.perf_counter() + _BUDGET_S
    for turn in range(MEETINGS_BEFORE_RECORDING + _REPEATS):
        if turn and time.perf_counter() > deadline:
            break
        for num_rows, context_len in cases:
            sessions = [SessionRows([0] * num_rows, context_len, own, num_logits_rows=num_rows) for own in blocks]
            taken_s = forward_s(runner, build_batch(sessions, block_size))
            seconds.setdefault((num_rows, context_len), []).append(taken_s)
    samples = {case: taken[MEETINGS_BEFORE_RECORDING:] for case, taken in seconds.items()}
    if not all(samples.values()):
        return ContextCosts()
    medians = {case: statistics.median(taken) for case, taken in samples.items()}
    few_s, many_s = (
        (medians[num_rows, _CONTEXT_LEN] - medians[num_rows, 0]) / (num_sessions * _CONTEXT_LEN)
        for num_rows in (_FEW_ROWS, _MANY_ROWS)
    )
    pair_s = max(0.0, (many_s - few_s) / (_MANY_ROWS - _FEW_ROWS))
    return ContextCosts(max(0.0, few_s - pair_s * _FEW_ROWS), pair_s)


def forward_s(runner: ModelRunner, batch: ForwardBatch, tap_layers: Sequence[int] = ()) -> float:
    """Seconds that one forward takes now."""
    started = time.perf_counter()
    runner.forward(batch, tap_layers)
    if runner.loaded.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
