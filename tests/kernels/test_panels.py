"""Linears over panels: every bit of a coded weight comes back, and a row's sums are taken in one order, with AMX and
without; without, in oneDNN's."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from outrider.kernels.cpu.emitters import multiplies_pairs
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear import cpu, cpu_panels, reference
from outrider.kernels.linear.cpu_panel_tiles import TILE_ROWS
from outrider.kernels.linear.cpu_panels import Panels

SHAPES = [
    (16, 2),
    (17, 33),
    (64, 64),
    (65, 64),
    (129, 1026),
    (192, 34),
    (208, 320),
    (1024, 1024),
    (320, 2100),
    (512, 2816),
    (4096, 192),
    (96, 640),
]
HAS_INSTRUCTION = multiplies_pairs()
needs_instruction = pytest.mark.skipif(not HAS_INSTRUCTION, reason="no bf16 panels here")
needs_amx = pytest.mark.skipif(not cpu_panels.has_amx(), reason="this CPU has no AMX, or may not use it")
both_units = pytest.mark.parametrize("use_amx", [False, pytest.param(True, marks=needs_amx)], ids=["vectors", "amx"])


def _cancelling(num_rows: int, num_outputs: int, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and bias whose products cancel in half of the rows: what is left shows the order of summation."""
    generator = torch.Generator().manual_seed(num_inputs)
    half = num_inputs // 2
    weight = torch.randn(num_outputs, num_inputs, generator=generator).bfloat16()
    weight[:, half : 2 * half] = weight[:, :half]
    x = torch.randn(num_rows, num_inputs, generator=generator).bfloat16()
    x[::2, half : 2 * half] = -x[::2, :half]
    return x, weight, (torch.randn(num_outputs, generator=generator) / 100).bfloat16()


def _decoded(packed: Panels) -> torch.Tensor:
    """The weight's bits, int16 [N, K], by the description in cpu_panel_coding and not by its code."""
    num_panels, num_lines = packed.panels.shape[:2]
    if packed.tables is None:
        lines = packed.panels.view(torch.int16).reshape(num_panels, num_lines, 128).numpy()
    else:
        assert packed.patches is not None
        assert packed.patch_ends is not None
        lower, names = packed.panels.numpy()[:, :, :128], packed.panels.numpy()[:, :, 128:]
        upper = np.empty((num_panels, num_lines, 4, 32), np.uint8)
        low = np.empty_like(upper)
        for vector in range(4):
            half = names & 15 if vector < 2 else names >> 4
            for group in range(4):
                there = slice(16 * group + 8 * (vector % 2), 16 * group + 8 * (vector % 2) + 8)
                here = slice(8 * group, 8 * group + 8)
                named = np.take_along_axis(packed.tables.numpy()[:, None], half[:, :, there], axis=2)
                upper[:, :, vector, here] = named
                low[:, :, vector, here] = lower[:, :, 64 * (vector // 2) :][:, :, there]
        octets = np.stack([low, upper], axis=-1).reshape(num_panels, num_lines * 256)
        ends = packed.patch_ends.numpy()
        chunks_of_panel = (len(ends) - 1) // num_panels
        for chunk in range(len(ends) - 1):
            for patch in packed.patches.numpy()[ends[chunk] : ends[chunk + 1]].tolist():
                octets[chunk // chunks_of_panel, chunk % chunks_of_panel * 64 * 256 + (patch & 0xFFFF)] = patch >> 16
        lines = octets.view(np.int16).reshape(num_panels, num_lines, 128)
    columns = lines.reshape(num_panels, num_lines, 64, 2).transpose(0, 2, 1, 3).reshape(num_panels * 64, -1)
    return torch.from_numpy(columns[: packed.num_outputs, : packed.num_inputs].copy())


def _by_the_rule(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, use_amx: bool = False
) -> torch.Tensor:
    """The order of summation, transcribed. In fp32, and the products are exact."""
    sums = _sums(x, weight, use_amx=use_amx)
    return torch.from_numpy(sums if bias is None else sums + bias.float().numpy()).bfloat16()


@functools.cache
def _case(
    shape: tuple[int, int], use_amx: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """x, weight, bias, and the outputs without bias and with it. The rule is slow, so it is followed once."""
    x, weight, bias = _cancelling(2 * TILE_ROWS + 40, *shape)
    weight.view(-1)[::1009] = 2.0**-60  # patches
    sums = _sums(x, weight, use_amx=use_amx)
    outputs = [torch.from_numpy(total).bfloat16() for total in (sums, sums + bias.float().numpy())]
    return x, weight, bias, (outputs[0], outputs[1])


def _sums(x: torch.Tensor, weight: torch.Tensor, *, use_amx: bool) -> np.ndarray:
    # With an even number of columns.
    left, right = (np.pad(matrix.float().numpy(), ((0, 0), (0, x.shape[1] % 2))) for matrix in (x, weight))
    return (_sums_by_amx if use_amx else _sums_by_vectors)(left, right)


def _sums_by_amx(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """TDPBF16PS (Intel 64 and IA-32 Architectures Software Developer's Manual, vol. 2), 32 inputs after 32 inputs: even
    and odd elements apart, each from zero on; then both together."""
    total = np.zeros((len(left), len(right)), np.float32)
    for first in range(0, left.shape[1], 32):
        chains = [np.zeros_like(total), np.zeros_like(total)]
        for element in range(first, first + 32):
            chains[element % 2] = chains[element % 2] + left[:, element, None] * right[None, :, element]
        total = total + (chains[0] + chains[1])
    return total


def _sums_by_vectors(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """In blocks, pair by pair, the odd element of a pair first."""
    block, total = cpu_panels.block_of(left.shape[1]), None
    for first in range(0, left.shape[1], block):
        fresh = np.zeros((len(left), len(right)), np.float32)
        for even in range(first, min(first + block, left.shape[1]), 2):
            for element in (even + 1, even):
                fresh = fresh + left[:, element, None] * right[None, :, element]
        total = fresh if total is None else total + fresh
    assert total is not None
    return total


@needs_instruction
@pytest.mark.parametrize("shape", SHAPES)
def test_every_bit_of_a_weight_comes_back(shape: tuple[int, int]) -> None:
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) / 30).bfloat16()
    weight.view(-1)[::7] = 0.0
    weight.view(-1)[1::501] = float("nan")
    weight.view(-1)[3::503] = -float("inf")
    weight.view(-1)[5::487] = 1e-40
    for coded in (False, True):
        packed = cpu_panels.pack(weight, coded=coded)
        assert torch.equal(_decoded(packed), weight.view(torch.int16)), coded
    if weight.numel() > 50_000 and shape[0] % 64 == 0:
        assert packed.tables is not None
        assert packed.nbytes < 0.79 * weight.nbytes  # twelve bits, and about 1 % patches of this weight


@needs_instruction
def test_a_weight_of_random_bits_is_kept_as_it_is() -> None:
    weight = torch.randint(-(2**15), 2**15, (128, 256), dtype=torch.int16).view(torch.bfloat16)
    packed = cpu_panels.pack(weight, coded=True)
    assert packed.tables is None
    assert torch.equal(_decoded(packed), weight.view(torch.int16))


@needs_instruction
def test_only_large_weights_are_coded_unasked() -> None:
    assert cpu_panels.pack(torch.zeros(1024, 512).bfloat16()).tables is None
    assert cpu_panels.pack(torch.zeros(1024, 1024).bfloat16()).tables is not None


@needs_instruction
@pytest.mark.usefixtures("_num_threads")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("coded", [False, True])
@both_units
def test_rows_have_the_bits_of_the_rule_whatever_their_number_and_place(
    shape: tuple[int, int], coded: bool, use_amx: bool
) -> None:
    """Data whose sums cancel: any other order of summation shows in nearly every output."""
    if use_amx and shape[1] % 32:
        assert not cpu_panels.pack(torch.zeros(shape).bfloat16()).amx
        return
    x, weight, bias, expected = _case(shape, use_amx)
    packed = cpu_panels.pack(weight, coded=coded, use_amx=use_amx)
    assert (packed.tables is not None) == coded
    for count in (*range(1, 18), 24, 31, 32, 33, 64, TILE_ROWS, TILE_ROWS + 1, 2 * TILE_ROWS + 3):
        rows = slice(count % 37, count % 37 + count)
        for with_bias in (False, True):
            found = cpu_panels.linear(x[rows], packed, bias if with_bias else None)
            assert torch.equal(found, expected[with_bias][rows]), f"{count} rows"


@needs_instruction
@both_units
def test_neighbouring_patches_are_all_applied(use_amx: bool) -> None:
    """Lines with several patches, at both ends of chunks, and chunks without any."""
    x, weight, _bias = _cancelling(40, 64, 512)
    for line, columns in ((0, (0, 1, 63)), (1, (5,)), (63, (7, 8)), (64, (9,)), (191, tuple(range(64))), (255, (33,))):
        for column in columns:
            power = 2.0 ** (20 + 2 * (column % 20))  # too many different ones for the table
            weight[column, 2 * line : 2 * line + 2] = torch.tensor([power, -1 / power])
    packed = cpu_panels.pack(weight, coded=True, use_amx=use_amx)
    assert packed.patches is not None
    assert len(packed.patches) > 100
    assert torch.equal(_decoded(packed), weight.view(torch.int16))
    expected = _by_the_rule(x, weight, None, use_amx=use_amx)
    for count in (1, 5, 8, 40):
        assert torch.equal(cpu_panels.linear(x[:count], packed), expected[:count]), count


@needs_instruction
@pytest.mark.skipif(cpu_panels.has_amx(), reason="oneDNN uses AMX here, in an order of its own")
@pytest.mark.skipif(not cpu.supports(torch.bfloat16), reason="oneDNN packs no bf16 weights on this CPU")
@pytest.mark.parametrize("shape", [*SHAPES, (64, 576), (64, 1026), (128, 4096)])
def test_the_rule_is_onednns(shape: tuple[int, int]) -> None:
    """What the module says of oneDNN, whose order is documented nowhere."""
    x, weight, bias = _cancelling(40, *shape)
    expected = cpu.linear(x, cpu.pack(weight), bias)
    assert torch.equal(cpu_panels.linear(x, cpu_panels.pack(weight, coded=True), bias), expected)


@needs_instruction
def test_outputs_match_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 130, generator=generator).bfloat16()
    weight = (torch.randn(80, 130, generator=generator) / 11).bfloat16()
    found = cpu_panels.linear(x, cpu_panels.pack(weight))
    assert found.shape == (2, 3, 80)
    torch.testing.assert_close(found, reference.linear(x, weight), atol=2**-6, rtol=0)
    apart = torch.cat((x, x), dim=-1)[..., :130]
    assert torch.equal(cpu_panels.linear(apart, cpu_panels.pack(weight)), found)
    assert cpu_panels.linear(x[:0], cpu_panels.pack(weight)).shape == (0, 3, 80)


def test_only_bf16_is_taken() -> None:
    assert not cpu_panels.supports(torch.float32)
    assert cpu_panels.supports(torch.bfloat16) == HAS_INSTRUCTION


@needs_instruction
@both_units
def test_nothing_is_written_or_read_beyond_the_last_column(use_amx: bool) -> None:
    x, weight, _bias = _cancelling(40, 65, 64)
    packed, far = cpu_panels.pack(weight, use_amx=use_amx), torch.full((66,), float("nan")).bfloat16()
    far[:65] = 1.0
    for count in (1, 40):
        found = cpu_panels.linear(x[:count], packed, far[:65])
        assert found.is_contiguous()
        assert torch.equal(found, _by_the_rule(x[:count], weight, far[:65], use_amx=use_amx))


@needs_instruction
def test_another_width_or_dtype_is_refused() -> None:
    packed = cpu_panels.pack(torch.zeros(64, 64).bfloat16())
    with pytest.raises(KernelArgumentError, match=r"x is bfloat16 \[2, 32\], expected bfloat16 \[\.\.\., 64\]"):
        cpu_panels.linear(torch.zeros(2, 32).bfloat16(), packed)
    with pytest.raises(KernelArgumentError, match="float32"):
        cpu_panels.linear(torch.zeros(2, 64), packed)
