"""Cost model of a forward: seconds by number of rows, measured at start and corrected by the forwards run since.

The table measured at start gives the shape; context costs (context_costs) are added to it. Two corrections follow the
machine. The level is the time that all forwards take beyond the model, whatever their size: other processes compute
meanwhile. The slope is how much steeper the cost per row has become. One factor for both would charge the level to the
rows (dad971d).

The level grows with the number of sessions, as gateway and clients work for each of them. So there is one level per
load class, and slopes are learned within a class only (docs/log.md: bd9aba7).
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.attention.batch import ForwardBatch, SessionRows, build_batch
from outrider.engine.recurrent.rows import measured_state
from outrider.engine.run.cpu_graphs import MEETINGS_BEFORE_RECORDING, ROW_BUCKETS
from outrider.engine.run.runner import ModelRunner
from outrider.verifier_service.timing.context_costs import (
    NO_CONTEXTS,
    ContextCosts,
    Contexts,
    forward_s,
    measure_context_costs,
)

# rows per session of a measured forward; 9a58dc0: batches of sessions with at most this many rows are recorded
_ROWS_PER_SESSION = 4
# forwards of each size; chosen: the median then tolerates two hiccups
_REPEATS = 5
# s; bounds the whole measurement; 5ea6568: a slow machine leaves out the larger sizes
_BUDGET_S = 6.0
# weights of the newest forward in the means of a level, and in the slope's variance and covariance; dad971d
_WEIGHT, _SLOPE_WEIGHT = 0.05, 0.025
# share of the mean cost; spread of sizes at which measured and tabulated slope count alike; dad971d
_TRUSTED_SPREAD = 0.035
# ratio to the table's slope; lower bound of the measured slope, and of a forward's cost; dad971d
_MIN_SLOPE = 0.1
# load classes per doubling of the sessions; 4: a class spans a fifth; chosen
_LOADS_PER_DOUBLING = 4
# ratio to the usual error; bounds the error that one forward adds to the slope; docs/log.md: 0c8a91f
_OUTLIER = 3.0


@dataclass
class _Level:
    """Mean seconds over the forwards of one load class: by table and contexts, and measured.

    count: forwards in the means; the initial values count as some.
    """

    expected_s: float
    measured_s: float
    count: float

    def move(self, expected_change_s: float, measured_change_s: float) -> None:
        self.count += 1.0
        weight = max(_WEIGHT, 1.0 / self.count)
        self.expected_s += weight * expected_change_s
        self.measured_s += weight * measured_change_s


class StepCosts:
    """The cost model of a forward: piecewise linear in the rows; beyond the table the slope of its last piece."""

    def __init__(self, table: Sequence[tuple[int, float]], context_costs: ContextCosts | None = None) -> None:
        """table: (rows, seconds), ascending in rows, at least one entry; without contexts."""
        self._context_costs = context_costs or ContextCosts()
        self._rows = [rows for rows, _seconds in table]
        # Running maximum: a larger size that measures less is noise.
        self._seconds = [max(seconds for _rows, seconds in table[: index + 1]) for index in range(len(table))]
        # Means over forwards: cached tokens of a forward, and their cost in seconds.
        self._mean_context_tokens = self._mean_context_s = 0.0
        # Levels by load class; the newest forward's level; moments of expected and measured seconds over all levels.
        self._levels: dict[int, _Level] = {}
        self._level: _Level | None = None
        self._variance = self._covariance = self._mean_error_s = 0.0

    def seconds(self, num_rows: float) -> float:
        """Returns a forward's seconds at the recent mean context. A fractional num_rows is a mean over forwards."""
        return self._corrected_s(self._table_s(num_rows) + self._mean_context_s, self._level)

    def seconds_beside(self, num_rows: float, num_sessions: float) -> float:
        """Returns `seconds` at the level of num_sessions' load class, if a forward of that class has been seen."""
        level = self._levels.get(load_of(round(num_sessions)), self._level)
        return self._corrected_s(self._table_s(num_rows) + self._mean_context_s, level)

    def rows_within(self, seconds: float, max_rows: int) -> int:
        """The most rows, up to max_rows, of a forward that takes at most `seconds`; 0 if one row takes longer."""
        return bisect_right(range(1, max_rows + 1), seconds, key=self.seconds)

    def drafts_s(self, num_sessions: int, num_draft_tokens: float) -> float:
        """Seconds that a mean of num_draft_tokens per session adds to a forward of one row per session."""
        rows_s = self.seconds(num_sessions * (1 + num_draft_tokens)) - self.seconds(num_sessions)
        pairs = Contexts(0, round(self._mean_context_tokens * num_draft_tokens))
        return rows_s + self._slope * self._context_costs.seconds(pairs)

    def mean_drafts_s(self, num_sessions: float, num_draft_tokens: float) -> float:
        """Returns `drafts_s` for a mean of num_sessions per forward, interpolated between whole numbers of sessions."""
        fewer = int(num_sessions)
        fewer_s, above = self.drafts_s(fewer, num_draft_tokens), num_sessions - fewer
        return fewer_s + (above * (self.drafts_s(fewer + 1, num_draft_tokens) - fewer_s) if above else 0.0)

    def observe(
        self, num_rows: int, seconds: float, contexts: Contexts = NO_CONTEXTS, *, num_sessions: int = 1
    ) -> None:
        """Learns from a forward that took `seconds`. contexts: before it."""
        context_s = self._context_costs.seconds(contexts)
        if self._level is None:
            self._mean_context_tokens, self._mean_context_s = float(contexts.num_tokens), context_s
        self._mean_context_tokens += _WEIGHT * (contexts.num_tokens - self._mean_context_tokens)
        self._mean_context_s += _WEIGHT * (context_s - self._mean_context_s)
        expected_s = self._table_s(num_rows) + context_s
        if expected_s <= 0.0:
            return
        level = self._level = self._level_of(num_sessions, expected_s)
        expected_change_s, measured_change_s = expected_s - level.expected_s, seconds - level.measured_s
        level.move(expected_change_s, measured_change_s)
        if level.count >= 1.0 / _WEIGHT:  # an unsettled level would be charged to the rows
            self._learn_slope(expected_change_s, measured_change_s)

    def _learn_slope(self, expected_s: float, measured_s: float) -> None:
        """Learns from a forward's seconds relative to its level: by table and contexts, and measured."""
        error_s = measured_s - self._slope * expected_s
        self._mean_error_s += _WEIGHT * (abs(error_s) - self._mean_error_s)
        bound_s = _OUTLIER * self._mean_error_s
        measured_s += min(max(error_s, -bound_s), bound_s) - error_s
        # The weight goes to 0 for a forward of the mean size: it has no information on the slope.
        prior = self._prior
        weight = _SLOPE_WEIGHT * expected_s * expected_s / (expected_s * expected_s + prior)
        self._variance += weight * (expected_s * expected_s - self._variance)
        self._covariance += weight * (expected_s * measured_s - self._covariance)

    def _level_of(self, num_sessions: int, expected_s: float) -> _Level:
        load = load_of(num_sessions)
        if load not in self._levels:
            # The first level stands on the measured table, a later one on an extrapolation.
            count = 1.0 if self._levels else 1.0 / _WEIGHT
            self._levels[load] = _Level(expected_s, self._corrected_s(expected_s, self._level), count)
        return self._levels[load]

    def _corrected_s(self, expected_s: float, level: _Level | None) -> float:
        """Corrects expected seconds by the measurements of a level; None, before the first forward: no correction."""
        if level is None:
            return expected_s
        # Extrapolated to few rows the line may fall below 0.
        corrected_s = level.measured_s + self._slope * (expected_s - level.expected_s)
        return max(_MIN_SLOPE * expected_s, corrected_s)

    @property
    def _slope(self) -> float:
        """The slope of measured over expected seconds: ridge regression towards 1."""
        prior = self._prior
        return max(_MIN_SLOPE, (self._covariance + prior) / (self._variance + prior))

    @property
    def _prior(self) -> float:
        return float((_TRUSTED_SPREAD * (self._level.expected_s if self._level else 1.0)) ** 2)

    def _table_s(self, num_rows: float) -> float:
        """Returns the seconds interpolated from the table."""
        index = min(max(bisect_right(self._rows, num_rows) - 1, 0), len(self._rows) - 1)
        return self._seconds[index] + self._table_slope(index) * (num_rows - self._rows[index])

    def _table_slope(self, index: int) -> float:
        if len(self._rows) == 1:
            return 0.0
        index = min(index, len(self._rows) - 2)
        rise = self._seconds[index + 1] - self._seconds[index]
        return rise / (self._rows[index + 1] - self._rows[index])


def load_of(num_sessions: int) -> int:
    """The load class of `num_sessions` >= 1, ascending: sessions of one class share what is measured."""
    return round(_LOADS_PER_DOUBLING * math.log2(num_sessions))


def measure_step_costs(
    runner: ModelRunner, num_blocks: int, block_size: int, tap_layers: Sequence[int] = ()
) -> StepCosts:
    """Runs forwards of short sequences over the first blocks of the cache; before sessions are served.

    tap_layers: layers whose hidden states are kept from the first session on.
    """
    deadline = time.perf_counter() + _BUDGET_S
    batches: dict[int, ForwardBatch] = {}
    # All sizes that the CPU records: recording one while sessions run would make their drafts look costly (9a58dc0).
    for num_rows in ROW_BUCKETS:
        sessions = _sessions(num_rows, block_size)
        if len({block for session in sessions for block in session.block_ids}) > num_blocks:
            break
        if len(sessions) > runner.most_measured_sessions:
            break
        batches[num_rows] = build_batch(sessions, block_size)
        for _ in range(MEETINGS_BEFORE_RECORDING):
            runner.forward(batches[num_rows], tap_layers)
        if time.perf_counter() > deadline:
            break
    seconds: dict[int, list[float]] = {num_rows: [] for num_rows in batches}
    # Sizes take turns, so that a hiccup meets all of them and the median over the turns drops it: 16 rows 10.7 to
    # 11.0 ms, and 10.5 to 12.2 with the forwards of a size in a row.
    for turn in range(_REPEATS):
        for num_rows, batch in batches.items():
            if turn and time.perf_counter() > deadline:
                break
            seconds[num_rows].append(forward_s(runner, batch, tap_layers))
    table = [(num_rows, statistics.median(taken)) for num_rows, taken in seconds.items()]
    context_costs = measure_context_costs(runner, num_blocks, block_size)
    return StepCosts(staircase(table) if runner.uses_graphs else table, context_costs)


def staircase(measured: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The table of forwards that are padded to the next measured size; beyond the last the slope of the last two."""
    table = list(measured[:1])
    for (size_before, _), (num_rows, seconds) in itertools.pairwise(measured):
        table += (
            [(size_before + 1, seconds), (num_rows, seconds)] if size_before + 1 < num_rows else [(num_rows, seconds)]
        )
    if len(measured) > 1:
        (size_before, seconds_before), (last, last_seconds) = measured[-2:]
        table.append((2 * last - size_before, 2 * last_seconds - seconds_before))
    return table


def _sessions(num_rows: int, block_size: int) -> list[SessionRows]:
    """Makes num_rows rows in sessions of at most _ROWS_PER_SESSION, each in blocks of its own."""
    sizes = [min(_ROWS_PER_SESSION, num_rows - start) for start in range(0, num_rows, _ROWS_PER_SESSION)]
    num_each = -(-_ROWS_PER_SESSION // block_size)
    return [
        SessionRows(
            [0] * size,
            0,
            list(range(index * num_each, (index + 1) * num_each)),
            num_logits_rows=size,
            state=measured_state(index),
        )
        for index, size in enumerate(sizes)
    ]
