"""The exact-mode grid on the GPU: groups of its covering sample, for as long as this section's share of the time lasts.

The whole sample, or the whole grid: `python -m tests.grid --device cuda`.
"""

from __future__ import annotations

import functools
import random
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.gpu_report.report import Finding, Part, Run, judged
from tests.grid.cells import covering_sample, groups
from tests.grid.grid import Grid, Outcome
from tests.grid.models import grid_model

# The fewest seconds in which a model is loaded, its plain runs are made and a few groups are compared.
_LEAST_S = 20.0
_SHARE_S = {False: 28.0, True: 15.0}  # of each model, quick or not
# The random mixture of experts and the random gemma2 first: what the demo family does not have shows there.
MODELS = ("demo-bfloat16", "gemma2-bfloat16", "mixtral-float32", "demo-float32")
_SEED = 5


def _measure(name: str, run: Run) -> Iterable[Finding]:
    ends = time.perf_counter() + min(_SHARE_S[run.quick], run.budget.left_s)
    with tempfile.TemporaryDirectory() as folder:
        grid = Grid(grid_model(name, Path(folder)), seed=_SEED, device=run.device.type)
        try:
            yield _compare(grid, name, ends)
        finally:
            grid.close()


def _compare(grid: Grid, name: str, ends: float) -> Finding:
    planned = list(groups(covering_sample(_SEED), _SEED))
    # A crowd takes little longer than a cell that runs alone.
    random.Random(_SEED).shuffle(planned)
    planned.sort(key=lambda group: len(group) == 1)
    outcomes: list[Outcome] = []
    digests: dict[str, str] = {}
    for group in planned:
        if outcomes and time.perf_counter() > ends:
            break
        report = grid.run(group)
        outcomes += report.outcomes
        digests |= report.digests
    wrong = [str(outcome) for outcome in outcomes if not outcome.agrees]
    num_hashes = len({(outcome.cell.parameters, outcome.digest) for outcome in outcomes})
    num_planned = sum(map(len, planned))
    measured = f"{len(outcomes)} of {num_planned} cells, {num_hashes} hashes for {len(digests)} requests"
    holds = not wrong and num_hashes == len(digests)
    num_accepted = sum(outcome.num_accepted_tokens for outcome in outcomes)
    return judged(
        name, "a hash a request", measured, holds, mismatches=wrong, digests=digests, num_accepted_tokens=num_accepted
    )


PARTS = [Part("grid", name, _LEAST_S, functools.partial(_measure, name)) for name in MODELS]
