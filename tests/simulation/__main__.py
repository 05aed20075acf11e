"""Simulates fleets under faults, one per seed: `python -m tests.simulation --seeds 0-1000`.

A seed whose promises are broken is shrunk to few faults and printed with its messages; `--seed N` shows any seed's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from tests.simulation.faults import ALL_FAULTS
from tests.simulation.mutants import MUTANTS, faults_for, seeds_for
from tests.simulation.run import run, show_broken
from tests.simulation.world import simulate

EPILOG = """examples:
  python -m tests.simulation --seeds 0-1000 --jobs 2
  python -m tests.simulation --seed 126 --messages
  python -m tests.simulation --hours 8 --jobs 2
  python -m tests.simulation --mutants 400
"""


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


def find_mutants(num_seeds: int) -> int:
    """Prints for each planted bug the first seed that finds it, as rows of a table; 1 if one was not found. The seeds
    that found it before come first.
    """
    print("| planted bug | seed | seconds of CPU | broken promise |\n|---|---|---|---|")
    num_found = 0
    for name, patch in MUTANTS.items():
        started, kinds = time.process_time(), faults_for(name)
        with patch():
            ends = (simulate(seed, kinds=kinds) for seed in seeds_for(name, num_seeds))
            outcome = next((end for end in ends if end.broken), None)
        seconds = time.process_time() - started
        what = f"not by {num_seeds} seeds" if outcome is None else str(outcome.seed)
        print(f"| {name} | {what} | {seconds:.0f} | {outcome.broken[0][:100] if outcome else ''} |", flush=True)
        num_found += outcome is not None
    print(f"{num_found} of {len(MUTANTS)} found")
    return int(num_found < len(MUTANTS))


if __name__ == "__main__":
    sys.exit(main())
