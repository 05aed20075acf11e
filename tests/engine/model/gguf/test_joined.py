"""Experts that a file has in several tensors are packed as one weight, K types with all their coded scales.

Oracle: the tensors' own dequantised weights, joined by torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.engine.model.gguf.architectures import ARCHITECTURES
from outrider.engine.model.gguf.joined import Part
from outrider.kernels.linear import cpu_code_panels
from outrider.kernels.linear.codes import Codes
from tests.kernels.test_code_panels import integers, make_coded, make_codes
from tests.kernels.test_panels import needs_instruction

_NUM_OUTPUTS, _NUM_INPUTS = 96, 512
_FILE: Any = None  # these joins read nothing of it
_KINDS = {
    "Q4_K": make_coded(integers(_NUM_OUTPUTS, _NUM_INPUTS, 0, 16), 32, minimums=True),
    "Q6_K": make_coded(integers(_NUM_OUTPUTS, _NUM_INPUTS, -32, 32), 16),
    "Q8_0": make_codes(integers(_NUM_OUTPUTS, _NUM_INPUTS, -128, 128), 32),
}


def part_of(kind: str, codes: Codes) -> Part:
    """A tensor of one expert."""
    return Part((1, *codes.shape), kind, lambda: codes.dequantised()[None], None, lambda _expert: codes)


@needs_instruction
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("architecture", ["gpt-oss", "granitemoe"])
def test_gate_and_up_are_packed_as_one(kind: str, architecture: str) -> None:
    gate = _KINDS[kind]
    up = gate.rows(torch.arange(_NUM_OUTPUTS).flip(0))
    joined = ARCHITECTURES[architecture].joined[0]
    _, reader = joined.join(_FILE, [part_of(kind, gate), part_of(kind, up)])
    assert reader.expert_codes is not None
    codes = reader.expert_codes(0)
    dim = 1 if architecture == "gpt-oss" else 0  # rows in turn, or one weight after the other
    wanted = torch.stack([gate.dequantised(), up.dequantised()], dim).flatten(0, 1)
    assert torch.equal(codes.dequantised(), wanted)
    packed = cpu_code_panels.pack([codes])
    assert torch.equal(cpu_code_panels.rows(torch.arange(len(wanted)), packed), wanted.bfloat16())
