"""Cost of the contexts that a forward attends to, measured once at start.

Attention reads every session's keys and values once and computes with them for each row, so the cost is linear in
cached tokens and in pairs of a cached token and a row. Without it, sessions that come and go would raise the price of
rows (StepCosts; 291382c).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from outrider.engine.attention.batch import ForwardBatch, SessionRows, build_batch
from outrider.engine.recurrent.rows import measured_state
from outrider.engine.run.cpu_graphs import MEETINGS_BEFORE_RECORDING
from outrider.engine.run.runner import ModelRunner
from outrider.verifier_service.scheduler import Work

# sessions of a measured forward, if the cache holds them; chosen: a usual batch under load
_MAX_SESSIONS = 16
# rows per session; the two sizes between which the cost of a pair is measured; chosen: no draft, and three draft tokens
_FEW_ROWS, _MANY_ROWS = 1, 4
# cached tokens per session; chosen: far above the noise of a forward, and short enough for small caches
_CONTEXT_LEN = 256
# measured forwards of each case; chosen: the median then tolerates two hiccups
_REPEATS = 5
# s; bounds the whole measurement; 9a58dc0: a model whose first turn takes longer gets no context costs
_BUDGET_S = 4.0


class Contexts(NamedTuple):
    """Cached tokens of all sessions in a forward, and pairs of a cached token and a row that attends to it."""

    num_tokens: int = 0
    num_pairs: int = 0

    @classmethod
    def of(cls, plan: Iterable[Work]) -> Self:
        """Counts a planned forward's contexts. A prompt chunk counts as one row, as its rows share what they read."""
        rows = [(work.session.num_computed, work.num_rows if work.num_chain_rows == 1 else 1) for work in plan]
        return cls(sum(length for length, _ in rows), sum(length * num_rows for length, num_rows in rows))


NO_CONTEXTS = Contexts()


@dataclass(frozen=True)
class ContextCosts:
    """The cost of contexts: seconds per cached token, and per pair of a cached token and a row."""

    token_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, contexts: Contexts) -> float:
        return self.token_s * contexts.num_tokens + self.pair_s * contexts.num_pairs


def measure_context_costs(runner: ModelRunner, num_blocks: int, block_size: int) -> ContextCosts:
    """Runs forwards with contexts and without, of _FEW_ROWS and of _MANY_ROWS per session; before sessions are served.

    Zero costs if the cache or the model's context is too small, or if the first turn exceeds _BUDGET_S.
    """
    num_blocks_each = -(-(_CONTEXT_LEN + _MANY_ROWS) // block_size)
    num_sessions = min(_MAX_SESSIONS, num_blocks // num_blocks_each, runner.most_measured_sessions)
    if num_sessions == 0 or runner.loaded.max_model_len < _CONTEXT_LEN + _MANY_ROWS:
        return ContextCosts()
    seconds: dict[tuple[int, int], list[float]] = {}
    blocks = [list(range(index * num_blocks_each, (index + 1) * num_blocks_each)) for index in range(num_sessions)]
    cases = list(itertools.product((_FEW_ROWS, _MANY_ROWS), (0, _CONTEXT_LEN)))
    deadline = time.perf_counter() + _BUDGET_S
    for turn in range(MEETINGS_BEFORE_RECORDING + _REPEATS):
        if turn and time.perf_counter() > deadline:
            break
        for num_rows, context_len in cases:
            sessions = [
                SessionRows([0] * num_rows, context_len, own, num_logits_rows=num_rows, state=measured_state(index))
                for index, own in enumerate(blocks)
            ]
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
    """Runs one forward and returns its seconds."""
    started = time.perf_counter()
    runner.forward(batch, tap_layers)
    if runner.loaded.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
