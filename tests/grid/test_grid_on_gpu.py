"""The exact-mode grid on a GPU: groups of its covering sample, for half a minute a model. The rest:
`python -m tests.grid --device cuda`."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from tests.grid.cells import covering_sample, groups
from tests.grid.grid import Grid, Outcome
from tests.grid.models import grid_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU tests/grid/test_exact_grid.py is the same"),
]
_SEED, _SECONDS = 5, 28.0


# The random mixture of experts and the random gemma2 first: what the demo family does not have shows there.
@pytest.mark.parametrize("name", ["gemma2-bfloat16", "mixtral-float32", "demo-bfloat16", "demo-float32"])
def test_a_request_has_one_output_whoever_drafts(tmp_path: Path, name: str) -> None:
    planned = list(groups(covering_sample(_SEED), _SEED))
    random.Random(_SEED).shuffle(planned)
    planned.sort(key=lambda group: len(group) == 1)  # a crowd takes little longer than a cell that runs alone
    ends = time.monotonic() + _SECONDS
    grid = Grid(grid_model(name, tmp_path), seed=_SEED, device="cuda")
    outcomes: list[Outcome] = []
    digests: dict[str, str] = {}
    try:
        for group in planned:
            report = grid.run(group)
            outcomes += report.outcomes
            digests |= report.digests
            if time.monotonic() > ends:
                break
    finally:
        grid.close()
    assert not [str(outcome) for outcome in outcomes if not outcome.agrees]
    assert len({(outcome.cell.parameters, outcome.digest) for outcome in outcomes}) == len(digests)
    assert sum(outcome.num_accepted_tokens for outcome in outcomes), "nothing was drafted"
