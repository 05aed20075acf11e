"""Seeds of the simulation: undisturbed, disturbed, those that once found a bug, and the bugs that were planted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.faults import CHANGES, MISHAPS
from tests.simulation.mutants import MUTANTS, faults_for, seeds_for
from tests.simulation.wishes import SHAPES
from tests.simulation.world import Outcome, simulate

ROOT = Path(__file__).parents[2]
# Seeds that broke a promise before there were grammars, changes and drafters that differ, and what was mended since. A
# change to the simulation itself gives seeds another meaning; each bug has a test of its own beside the code.
MENDED = {
    126: "a stream without a seed was resumed over tokens that were drawn again",
    351: "a half-open connection to Redis while scripts were loaded stopped all commits",
    802: "a method whose drafters went before the gateway's first request was refused as unknown",
    1465: "a power loss of Redis gave a session's epoch out again, and a stream was resumed over its other tokens",
}
# Undisturbed seeds in which one client's outputs make room for another's.
OUTPUTS_GIVE_WAY = (19, 31)
NUM_SEEDS, NUM_MORE_SEEDS = 40, 400
# seeds; within which each planted bug is found
MUTANT_SEEDS = 300
_DIGESTS = "from tests.simulation.world import simulate; print([simulate(seed).digest for seed in range(4)])"


def check(outcome: Outcome) -> None:
    again = f"python -m tests.simulation --seed {outcome.seed}"
    assert outcome.broken == [], f"{again}\n" + "\n".join(outcome.trace.lines[-100:])


def test_undisturbed_fleets_answer_with_the_law() -> None:
    for seed in range(12):
        outcome = simulate(seed, kinds=())
        check(outcome)
        assert outcome.num_answered > 0
        assert (outcome.num_refused, outcome.faults) == (0, {})


def test_disturbed_fleets_answer_with_the_law() -> None:
    outcomes = [simulate(seed) for seed in range(NUM_SEEDS)]
    for outcome in outcomes:
        check(outcome)
    assert sum(outcome.num_answered for outcome in outcomes) > 2 * NUM_SEEDS
    assert sum(len(outcome.faults) for outcome in outcomes) > 2 * NUM_SEEDS


@pytest.mark.parametrize("seed", MENDED, ids=lambda seed: f"{seed}-{MENDED[seed]}")
def test_seeds_that_once_found_a_bug(seed: int) -> None:
    check(simulate(seed, kinds=MISHAPS, shapes=("completion",), drafters_differ=False))


def test_changes_and_grammars_are_met() -> None:
    """Both versions of the wire side by side, keys that are replaced, and outputs under grammars."""
    seen: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for seed in range(16):
        outcome = simulate(seed, kinds=CHANGES)
        check(outcome)
        seen.update(outcome.seen)
        kinds.update(kind for kind, _ in outcome.faults.values())
    assert {f"answered {shape}" for shape in SHAPES} < set(seen)
    assert seen["message without newer fields"] > 50
    assert set(kinds) == set(CHANGES)


def test_outputs_that_give_way_go_on_where_they_stopped() -> None:
    """Twelve outputs of one client hold most places when another one comes."""
    for seed in OUTPUTS_GIVE_WAY:
        outcome = simulate(seed, kinds=())
        check(outcome)
        assert outcome.seen["output gave way"] > 0


def test_a_seed_is_the_same_again() -> None:
    for seed in (3, 126):
        first, second = simulate(seed), simulate(seed)
        assert first.trace.lines == second.trace.lines
        assert first.digest == second.digest


@pytest.mark.storm
def test_two_processes_see_the_same() -> None:
    """Whatever the addresses of objects and the hashes of texts are."""
    seen = [
        subprocess.run(
            [sys.executable, "-c", _DIGESTS],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        ).stdout
        for hash_seed in (1, 2)
    ]
    assert seen[0] == seen[1]
    assert len(set(seen[0].split(","))) == 4


@pytest.mark.parametrize("name", ["emit before commit", "a resumption one token late", "a session that stays"])
def test_planted_bugs_are_found(name: str) -> None:
    with MUTANTS[name]():
        assert any(simulate(seed).broken for seed in seeds_for(name, 20))


@pytest.mark.storm
@pytest.mark.timeout(3600)
def test_many_more_seeds() -> None:
    for seed in range(NUM_SEEDS, NUM_MORE_SEEDS):
        check(simulate(seed))


@pytest.mark.storm
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MUTANTS)
def test_every_planted_bug_is_found(name: str) -> None:
    with MUTANTS[name]():
        assert any(simulate(seed, kinds=faults_for(name)).broken for seed in seeds_for(name, MUTANT_SEEDS))
