"""The vectors' functions against fp64, over the whole range."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from numba import carray, njit

from outrider.kernels.cpu import record
from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.cpu.emitters import LANES
from outrider.kernels.cpu.simd import vload, vsigmoid, vsoftplus, vstore


class _Fields(NamedTuple):
    x: int
    out: int
    count: int
    is_softplus: int


_Record, _Call = record.record_types(_Fields)


@njit
def _apply(address, _unit, _thread):  # type: ignore[no-untyped-def]
    call = carray(address, 1, _Call)[0]
    for at in range(0, 4 * call.count, 4 * LANES):
        if call.is_softplus:
            vstore(call.out + at, vsoftplus(vload(call.x + at)))
        else:
            vstore(call.out + at, vsigmoid(vload(call.x + at)))


def applied(x: torch.Tensor, *, is_softplus: bool) -> torch.Tensor:
    out = torch.empty_like(x)
    call = _Record(x.data_ptr(), out.data_ptr(), len(x), is_softplus)
    cpu_team.run(cpu_team.Work(_apply, call, (out,), (x,)))
    return out


@pytest.mark.parametrize(
    ("is_softplus", "exact"),
    [(True, torch.nn.functional.softplus), (False, torch.sigmoid)],
    ids=["softplus", "sigmoid"],
)
def test_functions_are_within_four_units_in_the_last_place(
    is_softplus: bool, exact: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.cat([torch.linspace(-86, 86, 160_000), torch.linspace(-1, 1, 16_000), torch.tensor([0.0, -0.0] * 8)])
    found, expected = applied(x, is_softplus=is_softplus), exact(x.double())
    assert float(((found.double() - expected) / expected).abs().max()) < 4 * 2**-24


def test_extremes() -> None:
    x = torch.tensor([-torch.inf, -1e30, -100.0, 100.0, 1e30, torch.inf, torch.nan] + [0.0] * 9)
    softplus = applied(x, is_softplus=True)[:7]
    assert softplus[:6].tolist() == [0.0, 0.0, 0.0, 100.0, x[4].item(), torch.inf]
    assert bool(softplus[6].isnan())
    assert applied(x, is_softplus=False)[:6].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
