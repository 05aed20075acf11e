"""What grows is found, what does not is not: made-up series, and a process that really leaks."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.soak.samples import DESCRIPTORS, MEMORY, METRIC_SERIES, THREADS, Point, Samples, of_process
from tests.soak.verdict import Answer, Limits, Trend, latency_ratio, slope, trends, windows

_LEAK = """
import os, sys, threading, time
kept = []
print("ready", flush=True)
for _ in sys.stdin:
    kept.append(os.urandom(1 << 20))
    kept.append(os.open("/dev/null", os.O_RDONLY))
    thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
    thread.start()
    print("more", flush=True)
"""


def _series(value: Callable[[float], float], noise: float = 0.0) -> list[Point]:
    rng = random.Random(1)
    return [Point(at_s, value(at_s) + rng.uniform(-noise, noise)) for at_s in range(0, 1800, 10)]


def _trend(what: str, points: list[Point]) -> Trend:
    [trend] = trends({("verifier-0", what): points}, Limits())
    return trend


def test_the_slope_is_the_line_s_and_outliers_do_not_bend_it() -> None:
    points = _series(lambda at_s: 5 + 0.25 * at_s)
    assert slope(points) == pytest.approx(0.25)
    assert slope([*points[:-20], *(Point(point.at_s, 1e6) for point in points[-20:])]) == pytest.approx(0.25, rel=0.05)
    assert slope(points[:1]) == 0.0


@pytest.mark.parametrize(
    ("what", "value", "is_flat"),
    [
        (MEMORY, lambda _at_s: 500.0, True),
        (MEMORY, lambda at_s: 100 + 400 * min(1.0, at_s / 600), True),  # fills, then stands
        (MEMORY, lambda at_s: 500 + 0.5 * at_s / 60, True),
        (MEMORY, lambda at_s: 50 + 1.5 * at_s / 60, False),
        (MEMORY, lambda at_s: 5000 + 1.5 * at_s / 60, True),  # 1.5 MiB a minute are not 2 % of it
        (DESCRIPTORS, lambda _at_s: 40.0, True),
        (DESCRIPTORS, lambda at_s: 40 + at_s / 180, False),
        (METRIC_SERIES, lambda at_s: 180 + at_s // 600, True),
        (METRIC_SERIES, lambda at_s: 180 + at_s / 20, False),
        (THREADS, lambda at_s: 10 + at_s // 300, False),
    ],
)
def test_growth(what: str, value: Callable[[float], float], is_flat: bool) -> None:
    assert _trend(what, _series(value)).is_flat is is_flat
    assert _trend(what, _series(value, noise=0.4)).is_flat is is_flat


def test_latency_of_the_last_third_over_the_first() -> None:
    steady = [Answer(float(at_s), 1.0 + at_s % 10 / 10) for at_s in range(900)]
    slower = [Answer(answer.at_s, answer.seconds * (1.5 if answer.at_s >= 600 else 1.0)) for answer in steady]
    assert latency_ratio(steady, 0.0, 900.0) == 1.0
    assert latency_ratio(slower, 0.0, 900.0) == pytest.approx(1.5)
    [first, second] = windows(steady, 100.0, 300.0, 2)
    assert (first.begin_s, first.end_s, first.num_answers) == (100.0, 200.0, 100)
    assert (second.p50_s, second.p99_s) == (1.5, 1.9)


def test_a_process_that_leaks_is_found() -> None:
    samples = Samples()
    process = subprocess.Popen([sys.executable, "-c", _LEAK], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdout.readline()
        for _ in range(20):
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()
            samples.note("leak", of_process(process.pid))
            time.sleep(0.01)
        process.kill()
    found = {trend.what: trend for trend in trends(samples.series, Limits())}
    assert {what: trend.is_flat for what, trend in found.items()} == {MEMORY: False, DESCRIPTORS: False, THREADS: False}
    assert found[DESCRIPTORS].growth == pytest.approx(9, abs=3)


def test_a_process_that_is_gone_is_no_zero() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
        with pytest.raises(OSError, match=str(process.pid)):
            of_process(process.pid)
