"""The triton linears on packed codes against float64, and the bits of a row over row counts, places and blocks of rows.

Sums of small whole numbers with scales that are powers of two are exact in any order, so that they show an error of
indices, codes or groups to the bit. For rounding, the law's own bound. On a GPU the data of the tests of equal bits
cancels within each group, so that another order of summation would show; interpreted, products are summed in float64.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear import triton_code_blocks, triton_codes, triton_tiles
from outrider.kernels.linear.codes import Codes
from tests.kernels.test_code_panels import CASES, e4m3, error_bound, integers, make_codes, rows_and_bias, with_other
from tests.kernels.triton_device import device

pytestmark = pytest.mark.gpu

ON_GPU = device().type == "cuda"
BLOCKS = triton_tiles.ROW_BLOCKS + triton_tiles.MANY_ROW_BLOCKS
# Interpreted, a call takes up to a second: one count on either side of each tile.
_ROW_COUNTS = (*range(1, 21), 128, 129) if ON_GPU else (1, 2, 8, 9, 16, 17, 33)
_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12, 0], dtype=torch.int8)


def numbers_of(kind: str, num_outputs: int, num_inputs: int) -> torch.Tensor:
    """Small ones, so that their sums are exact."""
    if kind == "e4m3":
        exponents = integers(num_outputs, num_inputs, -1, 4).float()
        return (2**exponents * integers(num_outputs, num_inputs, -3, 4).float()).to(torch.float8_e4m3fn)
    if kind == "table":
        return _E2M1[integers(num_outputs, num_inputs, 0, 16).int()]
    return integers(num_outputs, num_inputs, *((-8, 8) if kind == "range" else (-31, 32)))


def exact_codes(kind: str, group: int, *, num_outputs: int = 37, num_inputs: int = 256, has_minimums: bool) -> Codes:
    """Scales are powers of two, zeros and minimums small whole numbers."""
    codes = make_codes(numbers_of(kind, num_outputs, num_inputs), group, zeros=has_minimums, minimums=has_minimums)
    generator = torch.Generator().manual_seed(group)
    scales = 2.0 ** torch.randint(-2, 2, codes.scales.shape, generator=generator)
    minimums = torch.randint(-3, 4, codes.scales.shape, generator=generator).half() if has_minimums else None
    return replace(codes, scales=scales.half(), minimums=minimums)


def whole_rows(num_rows: int, num_inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randint(-2, 3, (num_rows, num_inputs), generator=generator).bfloat16()


def packed(*codes: Codes) -> triton_code_blocks.CodeBlocks:
    return triton_code_blocks.pack(codes, device())


def found_by(x: torch.Tensor, codes: Codes, bias: torch.Tensor | None = None) -> torch.Tensor:
    on_device = None if bias is None else bias.to(device())
    return triton_codes.linear(x.to(device()), packed(codes), on_device).cpu()


def exact_product(x: torch.Tensor, codes: Codes) -> torch.Tensor:
    product = x.double() @ codes.dequantised().double().T
    assert torch.equal(product.float().double(), product), "a sum that float32 rounds would prove nothing"
    return product.bfloat16()


def telling_rows(codes: Codes, num_rows: int) -> tuple[torch.Tensor, Codes]:
    """Rows and codes in whose outputs another order of summation shows (see the top)."""
    x = torch.randn(num_rows, codes.shape[1], generator=torch.Generator().manual_seed(2)).bfloat16()
    if not ON_GPU or codes.grouping is None or codes.grouping.order is not None:
        return x, codes
    numbers = codes.numbers.view(torch.uint8).clone()
    size = codes.grouping.group_inputs
    for start in range(0, codes.shape[1], size):
        half = min(size, codes.shape[1] - start) // 2
        first, second = slice(start, start + half), slice(start + half, start + 2 * half)
        x[:, second], numbers[:, second] = -x[:, first], numbers[:, first]
    return x, replace(codes, numbers=numbers.view(codes.numbers.dtype))


def require_one_set_of_bits(codes: Codes, row_counts: tuple[int, ...]) -> None:
    """A row alone, and as the first and the last one of several."""
    x, codes = telling_rows(codes, max(row_counts))
    weight, x = packed(codes), x.to(device())
    bias = torch.randn(codes.shape[0], generator=torch.Generator().manual_seed(1)).bfloat16().to(device())
    expected = triton_codes.linear(x, weight, bias)
    assert expected.any(), "outputs that are all zero would tell nothing"
    for num_rows in row_counts:
        assert torch.equal(triton_codes.linear(x[:num_rows], weight, bias), expected[:num_rows]), num_rows
        last = triton_codes.linear(x[-num_rows:].flip(0), weight, bias).flip(0)
        assert torch.equal(last, expected[-num_rows:]), f"{num_rows} rows in the other order"


_GROUPS = [(256, 256), (128, 256), (64, 160), (32, 96), (16, 80)]


@pytest.mark.parametrize("has_minimums", [False, True], ids=["", "minimums"])
@pytest.mark.parametrize(("group", "num_inputs"), _GROUPS)
@pytest.mark.parametrize("kind", ["range", "table", "i8", "e4m3"])
def test_whole_numbers_are_multiplied_exactly(kind: str, group: int, num_inputs: int, has_minimums: bool) -> None:
    codes = exact_codes(kind, group, num_inputs=num_inputs, has_minimums=has_minimums)
    assert [part.kind for part in packed(codes).parts] == [kind]
    x = whole_rows(3, num_inputs)
    assert torch.equal(found_by(x, codes), exact_product(x, codes))


@pytest.mark.parametrize("what", ["numbers", "scales", "zeros", "minimums"])
def test_one_wrong_part_is_seen(what: str) -> None:
    codes = exact_codes("range", 16, num_inputs=80, has_minimums=True)
    parts: dict[str, Any] = {what: with_other(getattr(codes, what))}
    wrong = replace(codes, **parts)
    x = whole_rows(3, 80)
    assert not torch.equal(found_by(x, wrong), exact_product(x, codes))


@pytest.mark.parametrize("name", CASES)
def test_rows_are_as_near_to_the_exact_product_as_the_law_promises(name: str) -> None:
    codes, kind = CASES[name]
    x, bias = rows_and_bias(codes)
    x = x[:3]
    assert packed(codes).kinds == ("i8" if kind in ("i5", "i6") else kind,)
    exact = x.double() @ codes.dequantised().double().T + bias.double()
    error = (found_by(x, codes, bias).double() - exact).abs()
    assert bool((error <= error_bound(x, codes, bias)).all())


@pytest.mark.parametrize("name", ["iq4", "odd-inputs"])
def test_a_row_has_the_same_bits_in_some_numbers_of_rows(name: str) -> None:
    require_one_set_of_bits(CASES[name][0], (1, 2, 17))


@pytest.mark.storm
@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_in_every_number_of_rows(name: str) -> None:
    require_one_set_of_bits(CASES[name][0], _ROW_COUNTS)


@pytest.mark.storm
@pytest.mark.parametrize("group", [16, 32, 64, 128, 224])
@pytest.mark.parametrize("kind", ["range", "table", "i8", "e4m3"])
def test_every_kind_and_group_is_near_the_exact_product_and_keeps_its_bits(kind: str, group: int) -> None:
    numbers = e4m3(37, 224) if kind == "e4m3" else numbers_of(kind, 37, 224)
    codes = make_codes(numbers, group, minimums=kind in ("range", "i8"))
    x, bias = rows_and_bias(codes)
    exact = x.double() @ codes.dequantised().double().T + bias.double()
    error = (found_by(x, codes, bias).double() - exact).abs()
    assert bool((error <= error_bound(x, codes, bias)).all())
    require_one_set_of_bits(codes, _ROW_COUNTS)


@pytest.mark.storm
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(4096, 4096), (28672, 4096)] if ON_GPU else [(2100, 128)])
@pytest.mark.parametrize("kind", ["range", "table", "i8", "e4m3"])
def test_wide_weights_have_the_same_bits_in_every_number_of_rows(kind: str, num_outputs: int, num_inputs: int) -> None:
    numbers = e4m3(num_outputs, num_inputs) if kind == "e4m3" else numbers_of(kind, num_outputs, num_inputs)
    require_one_set_of_bits(make_codes(numbers, 32, minimums=True), (1, 16, 17, 33, 65) if ON_GPU else (1, 17))


@pytest.mark.storm
@pytest.mark.parametrize("group", [16, 32, 128, 0], ids=["16", "32", "128", "whole"])
@pytest.mark.parametrize("kind", ["range", "table", "i8", "e4m3"])
def test_weights_as_models_have_them(kind: str, group: int) -> None:
    """All inputs in one group too; of rows up to the tiles of many."""
    num_outputs, num_inputs = (1000, 2048) if ON_GPU else (37, 224)
    numbers = e4m3(num_outputs, num_inputs) if kind == "e4m3" else numbers_of(kind, num_outputs, num_inputs)
    codes = make_codes(numbers, group or num_inputs, minimums=group == 32)
    x, bias = rows_and_bias(codes)
    exact = x.double() @ codes.dequantised().double().T + bias.double()
    assert bool(((found_by(x, codes, bias).double() - exact).abs() <= error_bound(x, codes, bias)).all())
    require_one_set_of_bits(codes, (1, 2, 8, 17, 33, 64, 65, 130) if ON_GPU else (1, 33, 65))


@pytest.mark.storm
@pytest.mark.parametrize("name", CASES)
def test_the_blocks_of_rows_and_outputs_move_no_bit(name: str) -> None:
    x, codes = telling_rows(CASES[name][0], 40)
    weight, x = packed(codes), x.to(device())
    expected = triton_codes.linear(x, weight)
    # On a GPU blocks of 64 outputs are wgmma's: another kind of multiply-add (triton_tiles.KINDS_AGREE).
    for block_outputs in (16, 32) if ON_GPU and not triton_tiles.KINDS_AGREE else (16, 32, 64, 128):
        for block_rows in BLOCKS:
            found = triton_codes.linear_tiled(x, weight, block_rows=block_rows, block_outputs=block_outputs)
            assert torch.equal(found, expected), (block_rows, block_outputs)


@pytest.mark.storm
def test_kernels_compile_and_a_weight_keeps_to_one_kind_of_instruction() -> None:
    """What an interpreter takes, a compiler may not; in another process, since this one interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled_codes"]
    root = Path(__file__).parents[2]
    output = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout
    cases = [json.loads(line) for line in output.splitlines()]
    in_integers = [case for case in cases if case.get("in_integers")]
    assert (len(cases), len(in_integers)) == (25, 9)
    for case in in_integers:
        assert case["instructions"]
        assert all(re.search(r"k32\..*s32\.s8\.s8", name) for name in case["instructions"]), case
    for case in (case for case in cases if case not in in_integers):
        by_wgmma = case["uses_wgmma"] and case["capability"] == 90
        assert {name.split(".")[0] for name in case["instructions"]} == {"wgmma" if by_wgmma else "mma"}, case
        assert all(re.search(r"k16\..*f32\.bf16\.bf16", name) for name in case["instructions"]), case


def test_weights_of_several_kinds_are_one_linear_and_alike_ones_one_launch() -> None:
    parts = [
        exact_codes("range", 32, num_outputs=20, num_inputs=96, has_minimums=False),
        exact_codes("range", 32, num_outputs=7, num_inputs=96, has_minimums=False),
        exact_codes("i8", 32, num_outputs=20, num_inputs=96, has_minimums=False),
        exact_codes("table", 16, num_outputs=3, num_inputs=96, has_minimums=True),
        exact_codes("e4m3", 96, num_outputs=9, num_inputs=96, has_minimums=False),
        exact_codes("e4m3", 96, num_outputs=9, num_inputs=96, has_minimums=False),
    ]
    weight = packed(*parts)
    assert [part.kind for part in weight.parts] == ["range", "i8", "table", "e4m3"]
    assert weight.kinds == ("e4m3", "i4", "i8")
    x, bias = whole_rows(5, 96), torch.randint(-5, 6, (68,), generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = torch.cat([x.double() @ part.dequantised().double().T for part in parts], 1)
    assert torch.equal(triton_codes.linear(x.to(device()), weight).cpu(), expected.bfloat16())
    with_bias = triton_codes.linear(x.to(device()), weight, bias.to(device())).cpu()
    assert torch.equal(with_bias, (expected + bias.double()).bfloat16())


def test_strided_rows_of_several_dimensions() -> None:
    codes = exact_codes("range", 32, num_inputs=96, has_minimums=True)
    x = whole_rows(6, 200)[:, 7:103]
    found = triton_codes.linear(x.to(device()).view(2, 3, 96), packed(codes)).cpu()
    assert torch.equal(found.view(6, -1), exact_product(x, codes))
    assert triton_codes.linear(x[:0].to(device()), packed(codes)).shape == (0, 37)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_the_dequantised_weights(name: str) -> None:
    codes, _ = CASES[name]
    ids = torch.tensor([[codes.shape[0] - 1, 0, 17], [17, 5, 1]])
    found = triton_codes.rows(ids.to(device()), packed(codes)).cpu()
    assert torch.equal(found, codes.dequantised().bfloat16()[ids])


def test_rows_of_an_id_outside_are_nan() -> None:
    codes = CASES["q4_1"][0]
    found = triton_codes.rows(torch.tensor([-1, 2, 70], device=device()), packed(codes)).cpu()
    assert bool(found[[0, 2]].isnan().all())
    assert torch.equal(found[1], codes.dequantised().bfloat16()[2])


def test_what_does_not_fit_is_refused() -> None:
    even, scattered = (make_codes(integers(64, 64, -8, 8), 32, scattered=scattered) for scattered in (False, True))
    with pytest.raises(KernelArgumentError, match="cannot be packed"):
        packed(even, scattered)
    weight, x = packed(even), torch.zeros(2, 64, dtype=torch.bfloat16, device=device())
    with pytest.raises(KernelArgumentError, match=r"x is bfloat16 \[2, 63\], expected bfloat16 \[..., 64\]"):
        triton_codes.linear(x[:, :63], weight)
    with pytest.raises(KernelArgumentError, match="x is float32"):
        triton_codes.linear(x.float(), weight)
    with pytest.raises(KernelArgumentError, match="bias"):
        triton_codes.linear(x, weight, x[0, :63])
    with pytest.raises(KernelArgumentError, match="rows of one weight"):
        triton_codes.rows(x[0, :1], weight)


def test_all_of_a_packed_weight_is_on_its_device() -> None:
    codes = make_codes(numbers_of("table", 8, 80), 16, minimums=True, scattered=True)
    weight = triton_code_blocks.pack([codes], "meta")
    (part,) = weight.parts
    held = (weight.order, part.codes, part.table, part.scales, part.minimums)
    assert [None if tensor is None else tensor.device.type for tensor in held] == ["meta"] * 5


def test_memory_is_that_of_the_codes() -> None:
    four_bits = packed(make_codes(integers(128, 1024, -8, 8), 32))
    assert four_bits.nbytes / (128 * 1024) < 0.5 + 2 / 32 + 0.01
    by_output = packed(make_codes(integers(128, 1024, -128, 128), 1024, scale_type=torch.float32))
    assert by_output.nbytes / (128 * 1024) < 1 + 4 / 1024 + 0.01
