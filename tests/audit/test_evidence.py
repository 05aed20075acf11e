"""The e-process: mean 1 under the law by enumeration, and what it says about draws of known laws."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.client.audit import evidence
from outrider.client.audit.evidence import Draw, limit, weigh

_LAW = (0.5, 0.25, 0.15)  # and 0.1 of others


def _draw(rank: int, rest: float | None = 0.1, index: int = 0) -> Draw:
    return Draw(tuple(math.log(p) for p in _LAW), rest, rank, 0, index, (False, True, False))


@pytest.mark.parametrize("rest", [0.1, None])
def test_each_factor_of_a_marginal_family_has_mean_one(rest: float | None) -> None:
    ranks = (0, 1, 2, -1) if rest is not None else (0, 1, 2)
    chances = np.array([*_LAW, 0.1][: len(ranks)])
    chances /= chances.sum()
    columns = evidence._Columns([_draw(rank, rest) for rank in ranks])
    for name, factors in evidence._marginal_families(columns).items():
        np.testing.assert_allclose(chances @ np.exp(factors), 1.0, rtol=1e-9, err_msg=name)


def test_draws_of_the_law_raise_no_alarm_and_draws_of_another_do() -> None:
    rng = np.random.default_rng(3)
    right = [int(r) if r < 3 else -1 for r in rng.choice(4, size=3000, p=[0.5, 0.25, 0.15, 0.1])]
    sharper = [int(r) if r < 3 else -1 for r in rng.choice(4, size=3000, p=[0.6, 0.2, 0.12, 0.08])]
    assert not weigh([_draw(rank, index=i) for i, rank in enumerate(right)], 1.0).is_broken
    wrong = weigh([_draw(rank, index=i) for i, rank in enumerate(sharper)], 1.0)
    assert wrong.found_at is not None
    assert wrong.ln_e > limit(1.0)


def test_a_token_outside_of_the_law_is_proof() -> None:
    found = weigh([_draw(0, 0.0), _draw(-1, 0.0)], 1.0)
    assert found.num_impossible == 1
    assert found.is_broken


def test_no_draws_are_refused() -> None:
    with pytest.raises(ValueError, match="no draws"):
        weigh([], 1.0)
