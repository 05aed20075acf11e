"""Simulates fleets under faults, one per seed: `python -m tests.simulation --seeds 0-1000`.

A seed whose promises are broken is shrunk to few faults and printed with its messages; `--seed N` shows any seed's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

from tests.simulation.faults import ALL_FAULTS
from tests.simulation.mutants import MUTANTS
from tests.simulation.world import Outcome, shrunk, simulate

EPILOG = """examples:
  python -m tests.simulation --seeds 0-1000 --jobs 2
  python -m tests.simulation --seed 126 --messages
  python -m tests.simulation --hours 8 --jobs 2
  python -m tests.simulation --mutants 400
"""
# messages; of a broken seed that are printed
_MOST_LINES = 400


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="one seed")
    what.add_argument("--seeds", help="A-B: the seeds from A to before B")
    what.add_argument("--hours", type=float, help="fresh seeds for so long")
    what.add_argument("--mutants", type=int, metavar="N", help="plants each known bug: which of N seeds finds it?")
    parser.add_argument("--faults", default=",".join(ALL_FAULTS), help="kinds, comma-separated; empty: none")
    parser.add_argument("--without", default="", help="numbers of faults to leave out, as printed for a broken seed")
    parser.add_argument("--messages", action="store_true", help="print all that happened")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    kinds = tuple(kind for kind in args.faults.split(",") if kind)
    unknown = sorted(set(kinds) - set(ALL_FAULTS))
    if unknown:
        parser.error(f"--faults: {unknown[0]} is not one of {', '.join(ALL_FAULTS)}")
    if args.mutants is not None:
        return find_mutants(args.mutants)
    if args.seed is not None:
        without = frozenset(int(number) for number in args.without.split(",") if number)
        outcome = simulate(args.seed, kinds=kinds, without=without)
        if args.messages:
            print("\n".join(outcome.trace.lines))
        elif outcome.broken and not without:
            show_broken(outcome, kinds)
        print(f"seed {args.seed}: {outcome.broken or 'all promises kept'}; trace {outcome.digest}")
        return int(bool(outcome.broken))
    if args.seeds is not None:
        first, _, end = args.seeds.partition("-")
        return run(iter(range(int(first), int(end))), kinds, args.jobs)
    return run(_until(time.monotonic() + 3600.0 * args.hours), kinds, args.jobs)


def _until(end_s: float) -> Iterator[int]:
    seed = time.time_ns() % 10**9 * 1000
    while time.monotonic() < end_s:
        yield seed
        seed += 1


def _summary(seed: int, kinds: tuple[str, ...]) -> tuple[int, bool, str, int, int, list[tuple[str, str]]]:
    outcome = simulate(seed, kinds=kinds)
    done = list(outcome.faults.values())
    return seed, bool(outcome.broken), outcome.digest, outcome.num_answered, outcome.num_refused, done


def run(seeds: Iterator[int], kinds: tuple[str, ...], num_jobs: int) -> int:
    """Prints what was seen; 1 if a promise was broken."""
    started, broken = time.monotonic(), []
    num_seeds = num_answered = num_refused = 0
    met: Counter[tuple[str, str]] = Counter()
    with multiprocessing.get_context("spawn").Pool(num_jobs) as pool:
        for seed, is_broken, _, answered, refused, faults in pool.imap(partial(_summary, kinds=kinds), seeds):
            num_seeds, num_answered, num_refused = num_seeds + 1, num_answered + answered, num_refused + refused
            met.update(faults)
            if is_broken:
                broken.append(seed)
                show_broken(simulate(seed, kinds=kinds), kinds)
    minutes = (time.monotonic() - started) / 60.0
    print(f"{num_seeds} seeds, {num_seeds / minutes:.0f} a minute; {num_answered} answered, {num_refused} refused")
    for (kind, where), count in sorted(met.items()):
        print(f"  {kind:12} {where:9} {count}")
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


def find_mutants(num_seeds: int) -> int:
    """Prints for each planted bug the first seed that finds it; 1 if one was not found."""
    num_found = 0
    for name, patch in MUTANTS.items():
        started = time.monotonic()
        with patch():
            found = next((outcome for seed in range(num_seeds) if (outcome := simulate(seed)).broken), None)
        seconds = time.monotonic() - started
        if found is None:
            print(f"{name}: not found by {num_seeds} seeds, {seconds:.0f} s", flush=True)
        else:
            num_found += 1
            print(f"{name}: seed {found.seed}, {seconds:.0f} s: {found.broken[0][:160]}", flush=True)
    print(f"{num_found} of {len(MUTANTS)} found")
    return int(num_found < len(MUTANTS))


if __name__ == "__main__":
    sys.exit(main())
