"""Seeded random worlds of benchmarks/held_out.py: acceptance, prices, sessions, answers, proposed share by chance."""

from __future__ import annotations

import dataclasses
import random

from benchmarks.simulation.costs import Costs
from benchmarks.simulation.local_drafts import DraftPrices
from benchmarks.simulation.worlds.cells import MEASURED, SHAPES, Cell, plain_round_s, reshaped, steeper, warm_up_rounds
from benchmarks.simulation.worlds.text import Acceptance
from benchmarks.simulation.worlds.world import Server, World

SETS = ("random-a", "random-b")
_SESSIONS = (1, 2, 4, 8, 16, 32)
_ANSWERS = (24, 64, 200)
_PROMPT_ROWS = (8, 64, 160)
# rounds of plain decoding before the measurement: shorter than in named cells, as there are many worlds
_SESSION_ROUNDS, _FEWEST_ROUNDS, _MOST_ROUNDS = 4000, 300, 1500


def random_cells(group: str, costs: Costs, num_worlds: int, scale: float = 1.0) -> list[Cell]:
    """Returns the cells of one of SETS."""
    return [_cell(group, seed, costs, scale) for seed in range(num_worlds)]


def _cell(group: str, seed: int, costs: Costs, scale: float) -> Cell:
    rng = random.Random(f"{group} {seed}")
    num_sessions = rng.choice(_SESSIONS)
    costs = _machine(costs, rng)
    server = Server(costs, _prices(costs, rng), num_sessions)
    rounds = scale * warm_up_rounds(num_sessions, _SESSION_ROUNDS, _FEWEST_ROUNDS, _MOST_ROUNDS)
    warm_up_s = rounds * plain_round_s(costs, num_sessions)
    world = World(
        (server,), (_acceptance(rng),), rng.choice(_ANSWERS), rng.choice(_PROMPT_ROWS), warm_up_s, MEASURED * warm_up_s,
        seed=rng.randrange(1 << 20),
    )  # fmt: skip
    return Cell(group, f"{group}-{seed}", world)


def _machine(costs: Costs, rng: random.Random) -> Costs:
    costs = reshaped(costs, rng.choice(("measured", *SHAPES[:2])), factor=_log_uniform(rng, 0.5, 3.0))
    return dataclasses.replace(costs, verifier_step=steeper(costs.verifier_step, _log_uniform(rng, 0.2, 4.0)))


def _prices(costs: Costs, rng: random.Random) -> DraftPrices:
    """Draws prices: from a lookup's, a hundredth, to a draft model's, five times as much; some in one forward."""
    is_lookup, one_forward = rng.random() < 0.3, rng.random() < 0.2
    factor = 0.02 if is_lookup else _log_uniform(rng, 0.3, 5.0)
    step = tuple((rows, factor * seconds) for rows, seconds in costs.draft_step)
    fixed_s = factor * costs.draft_fixed_s * _log_uniform(rng, 0.3, 10.0)
    return DraftPrices(step, fixed_s, one_forward=one_forward, reads=not is_lookup)


def _acceptance(rng: random.Random) -> Acceptance:
    """Later places are worse by up to a fifth each; hard text accepts down to a fifth of what easy text does."""
    first, fall, hard = rng.uniform(0.2, 0.97), rng.uniform(0.8, 1.0), rng.uniform(0.2, 1.0)
    easy = tuple(first * fall**place for place in range(8))
    return Acceptance(
        easy,
        tuple(hard * chance for chance in easy),
        easy_run=rng.uniform(4.0, 40.0),
        hard_run=rng.uniform(4.0, 40.0),
        proposed=1.0 if rng.random() < 0.5 else rng.uniform(0.1, 0.9),
    )


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())
