"""The simulation on a few seeds: undisturbed, and twice the same."""

from __future__ import annotations

from tests.simulation.world import simulate


def test_undisturbed_fleets_answer_with_the_law() -> None:
    for seed in range(12):
        outcome = simulate(seed, kinds=())
        assert outcome.broken == [], f"seed {seed}"
        assert outcome.num_answered > 0
        assert outcome.num_refused == 0
