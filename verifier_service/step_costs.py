"""What a forward costs by the number of its rows: measured at start, kept up to date by what is measured since.

The table gives the shape (a few rows cost as much as one, many cost in proportion), to which comes what the contexts
cost (context_costs). Two figures on top of both follow the machine: what forwards take more than that, whatever their
size (other processes compute meanwhile), and how much steeper it has become, as far as forwards of several sizes tell.
With one factor for both a further row looked half as dear again under load as it was (16 sessions on two cores: 0.9 ms
for 0.5).

What all forwards take more grows with the sessions in them, as gateway and clients work for each, and with the sessions
come rows. So sizes are compared among forwards of about as many sessions: after two sessions had become eight, 24 rows
were held for 9.4 ms dearer than 8, and were 6.2.
"""

from __future__ import annotations

import itertools
import statistics
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from engine.batch import ForwardBatch, SessionRows, build_batch
from engine.cpu_graphs import MEETINGS_BEFORE_RECORDING, ROW_BUCKETS
from engine.runner import ModelRunner
from shared.loads import load_of
from verifier_service.context_costs import NO_CONTEXTS, ContextCosts, Contexts, forward_s, measure_context_costs

# Sessions of so few rows are recorded, however many they are.
_ROWS_OF_A_SESSION = 4
_REPEATS = 5
# The whole measurement; on a slow machine the larger batches are left out.
_BUDGET_S = 6.0
# Weight of the newest forward in the means, and in how they go together.
_WEIGHT = 0.05
_SLOPE_WEIGHT = 0.025
# The table's own slope is believed until sizes differ by about this share of their mean cost.
_TRUSTED_SPREAD = 0.035
_LEAST_SLOPE = 0.1
# One that missed what was expected of it by more than so many times the usual tells of a hiccup, not of its rows.
_OUTLIER = 3.0


@dataclass
class _Level:
    """Means over forwards of about as many sessions: what table and contexts say, and what was taken.

    What it begins with counts as `count` forwards.
    """

    expected: float
    taken: float
    count: float

    def move(self, ahead: float, late: float) -> None:
        self.count += 1.0
        weight = max(_WEIGHT, 1.0 / self.count)
        self.expected += weight * ahead
        self.taken += weight * late


class StepCosts:
    """Piecewise linear between the table's row counts; beyond the last the slope of the last piece goes on."""

    def __init__(self, table: Sequence[tuple[int, float]], context_costs: ContextCosts | None = None) -> None:
        """table: (rows, seconds), ascending in rows, at least one entry; without contexts."""
        self._context_costs = context_costs or ContextCosts()
        self._rows = [rows for rows, _seconds in table]
        # More rows never cost less: where it was measured so, that is noise.
        self._seconds = [max(seconds for _rows, seconds in table[: place + 1]) for place in range(len(table))]
        # Means over forwards: tokens of context, and what they cost.
        self._mean_context_tokens = self._mean_context_s = 0.0
        # By number of sessions; of the newest forward's; and how in all of them the two figures go together.
        self._levels: dict[int, _Level] = {}
        self._level: _Level | None = None
        self._variance = self._covariance = self._mean_miss = 0.0

    def seconds(self, num_rows: float) -> float:
        """Of a forward with contexts as they have been lately. Of a part of a row: in the mean over such forwards."""
        return self._taken(self._expected(num_rows) + self._mean_context_s)

    def rows_within(self, seconds: float, max_rows: int) -> int:
        """The most rows, up to max_rows, of a forward that takes at most so long; 0: not even one."""
        return bisect_right(range(1, max_rows + 1), seconds, key=self.seconds)

    def marginal_s(self, num_rows: int) -> float:
        """Seconds that one more row adds to a forward of `num_rows` rows."""
        return self.seconds(num_rows + 1) - self.seconds(num_rows)

    def drafts_s(self, num_sessions: int, num_draft_tokens: float) -> float:
        """Seconds that so many draft tokens of each session, in the mean, add to a forward of one row each."""
        rows_s = self.seconds(num_sessions * (1 + num_draft_tokens)) - self.seconds(num_sessions)
        pairs = Contexts(0, round(self._mean_context_tokens * num_draft_tokens))
        return rows_s + self._steepness * self._context_costs.seconds(pairs)

    def observe(
        self, num_rows: int, seconds: float, contexts: Contexts = NO_CONTEXTS, *, num_sessions: int = 1
    ) -> None:
        """A forward that has been run."""
        context_s = self._context_costs.seconds(contexts)
        if self._level is None:
            self._mean_context_tokens, self._mean_context_s = float(contexts.num_tokens), context_s
        self._mean_context_tokens += _WEIGHT * (contexts.num_tokens - self._mean_context_tokens)
        self._mean_context_s += _WEIGHT * (context_s - self._mean_context_s)
        expected = self._expected(num_rows) + context_s
        if expected <= 0.0:
            return
        level = self._level = self._level_of(num_sessions, expected)
        ahead, late = expected - level.expected, seconds - level.taken
        level.move(ahead, late)
        if level.count >= 1.0 / _WEIGHT:  # before, that all of them take longer would be taken for their rows
            self._learn_slope(ahead, late)

    def _learn_slope(self, ahead: float, late: float) -> None:
        """By how much a forward should have taken longer than those of its level, and has."""
        missed = late - self._steepness * ahead
        self._mean_miss += _WEIGHT * (abs(missed) - self._mean_miss)
        largest = _OUTLIER * self._mean_miss
        late += min(max(missed, -largest), largest) - missed
        # A forward of the usual size says nothing of the slope, so it makes nothing forgotten that is known of it.
        prior = self._prior
        weight = _SLOPE_WEIGHT * ahead * ahead / (ahead * ahead + prior)
        self._variance += weight * (ahead * ahead - self._variance)
        self._covariance += weight * (ahead * late - self._covariance)

    def _level_of(self, num_sessions: int, expected: float) -> _Level:
        place = load_of(num_sessions)
        if place not in self._levels:
            # The table was measured; what holds for other numbers of sessions is a guess.
            count = 1.0 if self._levels else 1.0 / _WEIGHT
            self._levels[place] = _Level(expected, self._taken(expected), count)
        return self._levels[place]

    def _taken(self, expected: float) -> float:
        """By forwards as the newest one; what table and contexts say where there was none."""
        if self._level is None:
            return expected
        # Towards no rows at all it must not fall below nothing.
        return max(_LEAST_SLOPE * expected, self._level.taken + self._steepness * (expected - self._level.expected))

    @property
    def _steepness(self) -> float:
        """Least squares, with the table as the prior (a ridge towards 1)."""
        prior = self._prior
        return max(_LEAST_SLOPE, (self._covariance + prior) / (self._variance + prior))

    @property
    def _prior(self) -> float:
        return float((_TRUSTED_SPREAD * (self._level.expected if self._level else 1.0)) ** 2)

    def _expected(self, num_rows: float) -> float:
        """What the table says."""
        place = min(max(bisect_right(self._rows, num_rows) - 1, 0), len(self._rows) - 1)
        return self._seconds[place] + self._slope(place) * (num_rows - self._rows[place])

    def _slope(self, place: int) -> float:
        if len(self._rows) == 1:
            return 0.0
        place = min(place, len(self._rows) - 2)
        rise = self._seconds[place + 1] - self._seconds[place]
        return rise / (self._rows[place + 1] - self._rows[place])


def measure_step_costs(
    runner: ModelRunner, num_blocks: int, block_size: int, tap_layers: Sequence[int] = ()
) -> StepCosts:
    """Runs forwards of short sequences over the first blocks of the cache; before anybody is served.

    tap_layers: those whose hidden states will be kept from the first session on.
    """
    deadline = time.perf_counter() + _BUDGET_S
    batches: dict[int, ForwardBatch] = {}
    # Every size that is recorded on the CPU: what is recorded while sessions run makes their drafts look dear.
    for num_rows in ROW_BUCKETS:
        sessions = _sessions(num_rows, block_size)
        if len({block for session in sessions for block in session.block_ids}) > num_blocks:
            break
        batches[num_rows] = build_batch(sessions, block_size)
        for _ in range(MEETINGS_BEFORE_RECORDING):
            runner.forward(batches[num_rows], tap_layers)
        if time.perf_counter() > deadline:
            break
    seconds: dict[int, list[float]] = {num_rows: [] for num_rows in batches}
    # One of each size after the other: a hiccup is then of all sizes, and the median over the turns leaves it out. With
    # three of one size in a row 16 rows took 10.5 to 12.2 ms, 20 13.6 to 16.3; so 10.7 to 11.0 and 13.8 to 14.5.
    for turn in range(_REPEATS):
        for num_rows, batch in batches.items():
            if turn and time.perf_counter() > deadline:
                break
            seconds[num_rows].append(forward_s(runner, batch, tap_layers))
    table = [(num_rows, statistics.median(taken)) for num_rows, taken in seconds.items()]
    context_costs = measure_context_costs(runner, num_blocks, block_size)
    return StepCosts(staircase(table) if runner.uses_graphs else table, context_costs)


def staircase(measured: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The table of forwards that are padded to the next size that was measured; beyond the last one the slope between
    the last two goes on."""
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
    """So many rows as sessions of few, each in blocks of its own."""
    sizes = [min(_ROWS_OF_A_SESSION, num_rows - start) for start in range(0, num_rows, _ROWS_OF_A_SESSION)]
    num_each = -(-_ROWS_OF_A_SESSION // block_size)
    return [
        SessionRows([0] * size, 0, list(range(place * num_each, (place + 1) * num_each)), num_logits_rows=size)
        for place, size in enumerate(sizes)
    ]
