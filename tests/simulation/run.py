"""Many seeds, on several processes, and what is printed of them."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import TypeAlias

from tests.simulation.faults import ALL_FAULTS
from tests.simulation.world import Outcome, shrunk, simulate

# Seed, whether it is broken, requests answered and refused, faults with their places, what else was seen.
Summary: TypeAlias = tuple[int, bool, int, int, list[tuple[str, str]], Counter[str]]
# messages; of a broken seed that are printed
_MOST_LINES = 400
# seeds; handed to each process at a time
_CHUNK = 20


def _freeze() -> None:
    """Before the first seed: a collection after each of them would look at all that was imported."""
    gc.collect()
    gc.freeze()


def _summary(seed: int, kinds: tuple[str, ...]) -> Summary:
    outcome = simulate(seed, kinds=kinds)
    counts = outcome.num_answered, outcome.num_refused
    return seed, bool(outcome.broken), *counts, list(outcome.faults.values()), outcome.seen


def _summaries(seeds: Iterator[int], kinds: tuple[str, ...], num_jobs: int) -> Iterator[Summary]:
    summary = partial(_summary, kinds=kinds)
    if num_jobs == 1:
        _freeze()
        yield from map(summary, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(num_jobs, _freeze) as pool:
        while chunk := list(islice(seeds, _CHUNK * num_jobs)):
            yield from pool.imap(summary, chunk)


def run(seeds: Iterator[int], kinds: tuple[str, ...], num_jobs: int) -> int:
    """Prints what was seen; 1 if a promise was broken."""
    started, broken = time.monotonic(), []
    num_seeds = num_answered = num_refused = 0
    met: Counter[tuple[str, str]] = Counter()
    also: Counter[str] = Counter()
    for seed, is_broken, answered, refused, faults, seen in _summaries(seeds, kinds, num_jobs):
        num_seeds, num_answered, num_refused = num_seeds + 1, num_answered + answered, num_refused + refused
        met.update(faults)
        also.update(seen)
        if is_broken:
            broken.append(seed)
            show_broken(simulate(seed, kinds=kinds), kinds)
    minutes = (time.monotonic() - started) / 60.0
    print(f"{num_seeds} seeds, {num_seeds / minutes:.0f} a minute; {num_answered} answered, {num_refused} refused")
    for (kind, where), count in sorted(met.items()):
        print(f"  {kind:12} {where:9} {count}")
    for what, count in sorted(also.items()):
        print(f"  {what:30} {count}")
    print(f"broken: {broken or 'none'}")
    return int(bool(broken))


def show_broken(outcome: Outcome, kinds: tuple[str, ...]) -> None:
    """Prints a broken seed with few faults, and how to see it again."""
    smallest, without = shrunk(outcome, kinds)
    print("\n".join(smallest.trace.lines[-_MOST_LINES:]))
    print(f"seed {outcome.seed} breaks: {smallest.broken}")
    print(f"with {list(smallest.faults.values())}; trace {smallest.digest}. Again:")
    left_out = f" --without {','.join(map(str, sorted(without)))}" if without else ""
    chosen = "" if kinds == ALL_FAULTS else f" --faults {','.join(kinds)}"
    print(f"  python -m tests.simulation --seed {outcome.seed}{chosen}{left_out} --messages", flush=True)
