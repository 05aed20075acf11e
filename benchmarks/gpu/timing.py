"""Times on a GPU: medians over replays of a CUDA graph, or wall-clock times of steps between two synchronisations.

The caller brings inputs in rotation: what fits into the L2 cache (60 MB) is read faster than memory can be.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Call = Callable[[], object]

# Together, copies of an input that no L2 cache holds: four times that of an H100.
ROTATED_BYTES = 240_000_000
_COPIED_BYTES = 1 << 30


def num_copies(num_bytes: int) -> int:
    """Returns how many copies of an input it takes so that none is cached when its turn comes."""
    return max(1, -(-ROTATED_BYTES // num_bytes))


def graph_us(calls: Sequence[Call], replays: int = 20) -> float:
    """Microseconds of one call: the median replay of a graph of all calls, at least eight, divided by their number."""
    turns = list(calls) * (-(-8 // len(calls)))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in turns:
            call()
    return statistics.median(event_us(graph.replay, replays)) / len(turns)


def event_us(call: Call, repeats: int) -> list[float]:
    """Microseconds between two events around each call, after three calls to warm up."""
    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times


def wall_us(calls: Mapping[str, Call], repeats: int) -> dict[str, float]:
    """Median microseconds of each call with all that the host does; the calls take turns."""
    for call in [*calls.values()] * 3:
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - started) * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


@functools.cache
def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 1 GiB."""
    source = torch.randint(256, (_COPIED_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = statistics.median(event_us(lambda: target.copy_(source), 20)) / 1e6
    return 2 * _COPIED_BYTES / seconds
