"""Parts of a weight on codes: its own numbers, and a law of their own where the cut leaves one.

Oracle: the same part of the whole weight, dequantised.
"""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.linear import coded_reference, cpu_code_panels
from outrider.kernels.linear.codes import MIN_CUT_INPUTS, Codes
from tests.kernels.test_code_panels import e4m3, integers, make_codes
from tests.kernels.test_panels import needs_instruction

_CODES: dict[str, Codes] = {
    "i4": make_codes(integers(70, 200, -8, 8), 32),
    "zeros": make_codes(integers(70, 200, -8, 8), 32, zeros=True),
    "minimums": make_codes(integers(70, 200, -32, 32), 32, minimums=True, scale_type=torch.float32),
    "e4m3-blocks-of-40": make_codes(e4m3(70, 200), 40),
    "one-group": make_codes(integers(70, 200, -128, 128), 200),
    "scattered": make_codes(integers(70, 200, -8, 8), 25, scattered=True),
}
_CUTS = ((0, 64), (64, 200), (0, 100), (48, 200), (16, 24), (36, 200), (99, 200), (37, 41))
# Starts that groups of 32 and 40, or parts of them that are not too small, have as a border.
_BORDERS = {0, 16, 48, 64}


@pytest.mark.parametrize("name", _CODES)
@pytest.mark.parametrize(("start", "end"), _CUTS)
def test_inputs_are_those_of_the_weight(name: str, start: int, end: int) -> None:
    whole = _CODES[name]
    part = whole.inputs(start, end)
    assert part.shape == (70, end - start)
    assert torch.equal(part.dequantised(), whole.dequantised()[:, start:end])


@pytest.mark.parametrize("name", ["i4", "zeros", "minimums", "e4m3-blocks-of-40"])
@pytest.mark.parametrize(("start", "end"), _CUTS)
def test_the_law_holds_unless_groups_would_be_too_small(name: str, start: int, end: int) -> None:
    size = 40 if "40" in name else 32
    of_one_group = start // size == (end - 1) // size
    part = _CODES[name].inputs(start, end)
    assert (part.grouping is not None) == (of_one_group or start in _BORDERS)
    if part.grouping is not None and part.scales.shape[1] > 1:
        assert part.grouping.group_inputs >= MIN_CUT_INPUTS


def test_a_start_on_a_border_leaves_the_groups_as_they_are() -> None:
    part = _CODES["i4"].inputs(64, 200)
    assert part.grouping is not None
    assert part.grouping.group_inputs == 32
    assert part.scales.shape == (70, 5)


@pytest.mark.parametrize(("start", "end"), _CUTS)
def test_one_scale_of_all_inputs_is_kept_once(start: int, end: int) -> None:
    part = _CODES["one-group"].inputs(start, end)
    assert part.grouping is not None
    assert part.scales.shape == (70, 1)


def test_inputs_whose_groups_are_scattered_follow_no_law() -> None:
    whole = _CODES["scattered"]
    assert whole.inputs(0, 100).grouping is None


@needs_instruction
@pytest.mark.parametrize("name", ["i4", "zeros", "minimums", "e4m3-blocks-of-40", "one-group"])
@pytest.mark.parametrize(("start", "end"), [(64, 200), (48, 200), (16, 24)])
def test_a_part_is_multiplied_by_the_law(name: str, start: int, end: int) -> None:
    part = _CODES[name].inputs(start, end)
    x = torch.randn(13, end - start, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(cpu_code_panels.linear(x, cpu_code_panels.pack([part])), coded_reference.linear(x, part))


@needs_instruction
@pytest.mark.parametrize(("start", "end"), [(0, 64), (64, 200), (128, 192), (0, 200)])
def test_outputs_of_whole_panels_are_those_of_the_weight(start: int, end: int) -> None:
    packed = cpu_code_panels.pack([make_codes(integers(200, 96, -8, 8), 32, zeros=True)])
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    part = cpu_code_panels.outputs(packed, start, end)
    assert part is not None
    assert torch.equal(cpu_code_panels.linear(x, part), cpu_code_panels.linear(x, packed)[:, start:end])
    assert part.parts is packed.parts


@needs_instruction
@pytest.mark.parametrize(("start", "end"), [(0, 100), (32, 96), (100, 200)])
def test_outputs_that_are_no_whole_panels_are_not_cut_out(start: int, end: int) -> None:
    packed = cpu_code_panels.pack([make_codes(integers(200, 96, -8, 8), 32)])
    assert cpu_code_panels.outputs(packed, start, end) is None
