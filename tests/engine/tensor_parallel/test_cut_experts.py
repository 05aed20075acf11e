"""Experts that wait to be packed are cut as plain ones are. Oracle: the cut of the dequantised weights."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from outrider.engine.model.coded_weights import Waiting, WaitingExperts
from outrider.engine.model.row_kernels import CodeKernels, resolve_code_kernels
from outrider.engine.tensor_parallel.experts import cut_experts
from outrider.kernels.linear.codes import Codes
from tests.kernels.test_code_panels import integers, make_codes

_NUM_EXPERTS, _INNER, _HIDDEN = 3, 96, 64
# Nothing is packed here: they are only handed on.
KERNELS = cast(CodeKernels, resolve_code_kernels("cpu", torch.bfloat16, torch.device("cpu")))


def codes_of(expert: int, num_outputs: int, num_inputs: int) -> Codes:
    return make_codes(integers(num_outputs, num_inputs, -8, 8).roll(expert), 32, zeros=True)


def waiting(codes: Codes) -> Waiting:
    return Waiting("checkpoint", "weight", codes.shape, partial(lambda found: found, codes))


def dequantised(stacked: WaitingExperts) -> torch.Tensor:
    """[E, N, K]"""
    of_experts = [torch.cat([part.codes().dequantised() for part in parts]) for parts in stacked.parts]
    return torch.stack(of_experts)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize(("start", "end"), [(0, 64), (64, 96), (32, 64)])
def test_waiting_experts_are_cut_as_plain_ones(num_parts: int, start: int, end: int) -> None:
    """Gate and up as one weight of an expert, and as two."""
    gate_up_parts = tuple(
        tuple(waiting(codes_of(expert + part, 2 * _INNER // num_parts, _HIDDEN)) for part in range(num_parts))
        for expert in range(_NUM_EXPERTS)
    )
    down_parts = tuple((waiting(codes_of(expert, _HIDDEN, _INNER)),) for expert in range(_NUM_EXPERTS))
    coded = SimpleNamespace(
        gate_up_proj=WaitingExperts((_NUM_EXPERTS, 2 * _INNER, _HIDDEN), gate_up_parts, (), KERNELS),
        down_proj=WaitingExperts((_NUM_EXPERTS, _HIDDEN, _INNER), down_parts, (), KERNELS),
    )
    plain = SimpleNamespace(gate_up_proj=dequantised(coded.gate_up_proj), down_proj=dequantised(coded.down_proj))
    uneven: set[str] = set()
    cut_experts(coded, (start, end), uneven)
    cut_experts(plain, (start, end), set())
    for name in ("gate_up_proj", "down_proj"):
        found, wanted = getattr(coded, name), getattr(plain, name)
        assert found.shape == tuple(wanted.shape)
        assert torch.equal(dequantised(found), wanted)
    assert not uneven


def test_groups_of_inputs_that_cannot_be_packed_are_told_once_they_are_read() -> None:
    scattered = make_codes(integers(_HIDDEN, _INNER, -8, 8), 32, scattered=True)
    parts = ((waiting(scattered),),)
    gate_up_parts = ((waiting(codes_of(0, 2 * _INNER, _HIDDEN)),),)
    coded = SimpleNamespace(
        gate_up_proj=WaitingExperts((1, 2 * _INNER, _HIDDEN), gate_up_parts, (), KERNELS),
        down_proj=WaitingExperts((1, _HIDDEN, _INNER), parts, (), KERNELS),
    )
    uneven: set[str] = set()
    cut_experts(coded, (0, 64), uneven)
    assert not uneven
    assert torch.equal(dequantised(coded.down_proj)[0], scattered.dequantised()[:, :64])
    assert uneven == {"weight"}
