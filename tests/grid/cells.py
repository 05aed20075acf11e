"""The axes of the grid, and samples of their product.

Not here: what an axis value means for the engine (driver) and for the request (requests).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

PLAIN = ("off_free", "off_step")
DRAFTERS = (
    *(
        "ngram",
        "suffix",
        "draft_model",
        "medusa",
        "mlp_speculator",
        "eagle",
        "eagle3",
        "dspark",
        "dflash",
        "eagle3+suffix",
    ),
    *("noise", "oracle"),
)
LENGTHS = (1, 2, 3, 5, 8)
PARAMETERS = ("greedy", "t0.7", "t1.3", "top_p", "penalties", "grammar")
CROWDS = ("alone", "eight")
PREFILLS = ("whole", "chunk16")
CACHES = ("hit", "evicted", "preempted")
SHAPES = ("chain", "tree")
# "eight" is eight at least.
CROWD_SIZE = 8


@dataclass(frozen=True, order=True)
class Cell:
    """One way to the same output. `gamma` is 0 and `shape` "none" where nobody drafts."""

    drafter: str
    gamma: int
    shape: str
    parameters: str
    crowd: str
    prefill: str
    cache: str

    def __str__(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def all_cells() -> list[Cell]:
    """The full product: 8,784 cells."""
    drafts = [(drafter, 0, "none") for drafter in PLAIN]
    drafts += list(itertools.product(DRAFTERS, LENGTHS, SHAPES))
    rest = itertools.product(drafts, PARAMETERS, CROWDS, PREFILLS, CACHES)
    return [Cell(*draft, *values) for draft, *values in rest]


def pairs_of(cell: Cell) -> frozenset[tuple[str, object, str, object]]:
    """Every pair of axis values that the cell holds."""
    values = [(field.name, getattr(cell, field.name)) for field in fields(cell)]
    return frozenset((*first, *second) for first, second in itertools.combinations(values, 2))


def covering_sample(seed: int) -> list[Cell]:
    """Cells in which every pair of axis values occurs; greedy, so about a fifth above the fewest possible.

    A cell that runs alone costs as much as four of a crowd, so it has to bring more.
    """
    order = all_cells()
    random.Random(seed).shuffle(order)
    pairs = {cell: pairs_of(cell) for cell in order}
    missing = set().union(*pairs.values())
    chosen: list[Cell] = []
    while missing:
        best = max(order, key=lambda cell: len(pairs[cell] & missing) * (1 if cell.crowd == "alone" else 4))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


def random_sample(seed: int, count: int) -> list[Cell]:
    cells = all_cells()
    return random.Random(seed).sample(cells, min(count, len(cells)))


def groups(cells: Sequence[Cell], seed: int) -> Iterator[list[Cell]]:
    """Cells that run at the same time on one engine: alone, or crowds of 8 to 15 with the same prefill and blocks.

    What is missing to a crowd of eight is made up with further cells of the same kind, which are checked as well.
    """
    rng = random.Random(seed)
    for cell in cells:
        if cell.crowd == "alone":
            yield [cell]
    everything = [cell for cell in all_cells() if cell.crowd == "eight"]
    for prefill, preempted in itertools.product(PREFILLS, (False, True)):

        def fits(cell: Cell, prefill: str = prefill, preempted: bool = preempted) -> bool:
            return cell.prefill == prefill and (cell.cache == "preempted") == preempted

        members = [cell for cell in cells if cell.crowd == "eight" and fits(cell)]
        if members and len(members) < CROWD_SIZE:
            spare = [cell for cell in everything if fits(cell) and cell not in members]
            members += rng.sample(spare, CROWD_SIZE - len(members))
        rng.shuffle(members)
        num_groups = len(members) // CROWD_SIZE
        for index in range(num_groups):
            yield members[index::num_groups]
