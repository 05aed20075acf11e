"""Does it grow? The slope that is the median of all pairs' (Theil-Sen), over the second half of a run, against limits.

The first half is left out: caches fill, allocators find their size. Not here: what is measured (samples.py, load.py).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.soak.samples import KEYS, MEMORY, METRIC_SERIES, Point

NUM_THIRDS = 3


@dataclass(frozen=True)
class Limits:
    """Memory must keep one of its two limits; of all else the growth over the judged half is counted. Keys have none:
    they are as many as requests came in their time to live, and must be gone at the end.

    memory_mb_per_min, memory_share: MiB a minute, and the growth over the judged half as a share of its beginning.
    series_share: likewise; labels of what happens seldom come late, those of a request would come by the hundred.
    latency_ratio: of p99, the last third's over the first's.
    """

    memory_mb_per_min: float = 1.0
    memory_share: float = 0.02
    series_share: float = 0.05
    count: float = 2.0
    latency_ratio: float = 1.25


@dataclass(frozen=True)
class Trend:
    """begin, end: medians of the first and last quarter of the judged half. growth: slope times its length."""

    process: str
    what: str
    begin: float
    end: float
    per_min: float
    growth: float
    is_flat: bool


@dataclass(frozen=True)
class Answer:
    """at_s: when it was complete, since the start of the run."""

    at_s: float
    seconds: float


@dataclass(frozen=True)
class Window:
    begin_s: float
    end_s: float
    num_answers: int
    p50_s: float
    p99_s: float


def slope(points: Sequence[Point]) -> float:
    """Per second; 0 of fewer than two points."""
    pairs = itertools.combinations(points, 2)
    slopes = [(late.value - early.value) / (late.at_s - early.at_s) for early, late in pairs if late.at_s > early.at_s]
    return statistics.median(slopes) if slopes else 0.0


def trends(series: Mapping[tuple[str, str], Sequence[Point]], limits: Limits) -> list[Trend]:
    return [_trend(process, what, points, limits) for (process, what), points in sorted(series.items())]


def _trend(process: str, what: str, points: Sequence[Point], limits: Limits) -> Trend:
    middle_s = (points[0].at_s + points[-1].at_s) / 2
    half = [point for point in points if point.at_s >= middle_s]
    quarter = max(1, len(half) // 4)
    begin, end = (statistics.median(point.value for point in part) for part in (half[:quarter], half[-quarter:]))
    per_s = slope(half)
    growth = per_s * (half[-1].at_s - half[0].at_s)
    if what == MEMORY:
        is_flat = per_s * 60 < limits.memory_mb_per_min or growth < limits.memory_share * begin
    elif what == METRIC_SERIES:
        is_flat = growth <= limits.series_share * begin
    else:
        is_flat = what == KEYS or growth <= limits.count
    return Trend(process, what, begin, end, per_s * 60, growth, is_flat)


def windows(answers: Sequence[Answer], begin_s: float, end_s: float, count: int) -> list[Window]:
    """The time [begin_s, end_s) in so many equal parts."""
    length_s = (end_s - begin_s) / count
    return [_window(answers, begin_s + place * length_s, begin_s + (place + 1) * length_s) for place in range(count)]


def _window(answers: Sequence[Answer], begin_s: float, end_s: float) -> Window:
    seconds = sorted(answer.seconds for answer in answers if begin_s <= answer.at_s < end_s)
    return Window(begin_s, end_s, len(seconds), _quantile(seconds, 0.5), _quantile(seconds, 0.99))


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


def latency_ratio(answers: Sequence[Answer], begin_s: float, end_s: float) -> float:
    """p99 of the last third over p99 of the first; not a number where one of them has no answers."""
    first, *_, last = windows(answers, begin_s, end_s, NUM_THIRDS)
    return last.p99_s / first.p99_s
