"""The triton linear against fp64, and the bits of a row over row counts, places, blocks of rows and tiles.

On a GPU the data of the tests of equal bits cancels, so that rounding noise of the order of summation is all that is
left: any other order shows in nearly every output. Interpreted, the products of a tile are numpy's, whose order hangs
on the tile: there the data are small integers, whose sums are exact, and what shows is an error of indices.
"""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear import reference, triton, triton_tiles
from tests.kernels.triton_device import device

pytestmark = pytest.mark.gpu

ON_GPU = device().type == "cuda"
DTYPES = (torch.bfloat16, torch.float32)
BLOCKS = triton_tiles.ROW_BLOCKS + triton_tiles.MANY_ROW_BLOCKS
# [N, K]: on a GPU those of a Llama of 8 billion parameters, a narrow and an odd one; interpreted, tiny ones.
SHAPES = (
    [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1024, 2048), (1000, 1111)]
    if ON_GPU
    else [(96, 64), (40, 300)]
)
ROW_COUNTS = (2, 8, 16, 17, 32, 33, 64, 65, 128, 200, 1024, 4096) if ON_GPU else (2, 17, 33, 65, 130)


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator(device()).manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device=device()).to(dtype)


def _telling(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and bias in whose outputs another order of summation shows (see the top)."""
    if not ON_GPU:
        generator = torch.Generator().manual_seed(num_rows)
        shapes = (num_rows, num_inputs), (num_outputs, num_inputs), (num_outputs,)
        x, weight, bias = (torch.randint(-4, 5, shape, generator=generator).to(dtype) for shape in shapes)
        return x, weight, bias
    x, weight = _normal(num_rows, num_inputs, dtype=dtype), _normal(num_outputs, num_inputs, dtype=dtype)
    half = num_inputs // 2
    x[:, half : 2 * half], weight[:, half : 2 * half] = -x[:, :half], weight[:, :half]
    return x, weight, _normal(num_outputs, dtype=dtype) / 1024


def _assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    # Sums of up to 1111 products of about 1 are of size 30, whose fp32 noise stands beside sums near 0.
    tolerance = 2**-7 if found.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 16, 70, 129])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (16, 256), (33, 50), (200, 300)])
def test_rows_match_the_reference(num_outputs: int, num_inputs: int, num_rows: int, dtype: torch.dtype) -> None:
    x, weight = _normal(num_rows, num_inputs, dtype=dtype), _normal(num_outputs, num_inputs, dtype=dtype)
    bias = _normal(num_outputs, dtype=dtype)
    _assert_close(triton.linear(x, weight), reference.linear(x, weight))
    _assert_close(triton.linear(x, weight, bias), reference.linear(x, weight, bias))


@pytest.mark.parametrize("num_outputs", [2100, 8200])
def test_the_tiles_of_wider_weights_match_the_reference(num_outputs: int) -> None:
    x, weight = _normal(3, 40, dtype=torch.bfloat16), _normal(num_outputs, 40, dtype=torch.bfloat16)
    _assert_close(triton.linear(x, weight), reference.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_folded_rows(dtype: torch.dtype) -> None:
    together, weight = _normal(6, 120, dtype=dtype), _normal(24, 48, dtype=dtype)
    _assert_close(triton.linear(together[:, 7:55], weight), reference.linear(together[:, 7:55], weight))
    folded = together[:, :96].view(2, 3, 2, 48)
    assert triton.linear(folded, weight).shape == (2, 3, 2, 24)
    _assert_close(triton.linear(folded, weight), reference.linear(folded, weight))
    turned = together[:, :48].t().contiguous().t()
    _assert_close(triton.linear(turned, weight), reference.linear(turned, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_beyond_the_row_and_the_weight_is_read(dtype: torch.dtype) -> None:
    large_x, large_weight = (torch.full((50, 80), torch.nan, dtype=dtype, device=device()) for _ in range(2))
    x, weight = large_x[5:25, 8:58], large_weight[3:40, 16:66]
    x.copy_(_normal(20, 50, dtype=dtype))
    weight.copy_(_normal(37, 50, dtype=dtype))
    expected = triton.linear(x, weight)
    _assert_close(expected, reference.linear(x, weight))
    x[7] = torch.nan
    found = triton.linear(x, weight)
    assert torch.equal(found[:7], expected[:7])
    assert torch.equal(found[8:], expected[8:])
    assert found[7].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_a_row_has_the_same_bits_in_every_number_of_rows(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = _telling(ROW_COUNTS[-1], num_outputs, num_inputs, dtype)
    single = torch.cat([triton.linear(x[row : row + 1], weight, bias) for row in range(ROW_COUNTS[0])])
    assert single.any(), "outputs that are all zero would tell nothing"
    for num_rows in ROW_COUNTS:
        first = triton.linear(x[:num_rows], weight, bias)
        assert torch.equal(first[: len(single)], single), f"first of {num_rows} rows"
        last = triton.linear(x[:num_rows].flip(0), weight, bias).flip(0)
        assert torch.equal(last, first), f"{num_rows} rows in the other order"


@pytest.mark.parametrize("block_rows", BLOCKS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_the_block_of_rows_moves_no_bit(num_outputs: int, num_inputs: int, block_rows: int) -> None:
    for dtype in DTYPES:
        x, weight, bias = _telling(40, num_outputs, num_inputs, dtype)
        tile = triton_tiles.tile_config(num_outputs, num_inputs, dtype)
        expected = triton.linear_tiled(x, weight, bias, tile, BLOCKS[0])
        assert torch.equal(triton.linear_tiled(x, weight, bias, tile, block_rows), expected)


@pytest.mark.parametrize("tile", triton_tiles.CANDIDATES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [SHAPES[0], SHAPES[-1]])
def test_tiles_of_one_kind_of_instruction_agree_to_the_bit(
    num_outputs: int, num_inputs: int, tile: triton_tiles.Tile
) -> None:
    x, weight, bias = _telling(40, num_outputs, num_inputs, torch.bfloat16)
    first = next(
        other for other in triton_tiles.CANDIDATES if triton_tiles.KINDS_AGREE or other.uses_wgmma == tile.uses_wgmma
    )
    expected = triton.linear_tiled(x, weight, bias, first, 16)
    for block_rows in BLOCKS[:1] + BLOCKS[-1:]:
        assert torch.equal(triton.linear_tiled(x, weight, bias, tile, block_rows), expected)


@pytest.mark.parametrize("num_outputs", [512, 4096, 6144, 28672, 128256])
def test_a_weight_keeps_to_one_kind_of_instruction(num_outputs: int) -> None:
    tiles = {
        triton_tiles.tile_config(num_outputs, 4096, torch.bfloat16, num_rows) for num_rows in (1, 64, 65, 640, 4096)
    }
    assert triton_tiles.KINDS_AGREE or len({tile.uses_wgmma for tile in tiles}) == 1
    for tile in tiles:
        assert all(tile.stages(block_rows, 2) >= 2 for block_rows in BLOCKS)


def test_blocks_of_rows_hold_the_rows_or_are_the_largest() -> None:
    assert [triton_tiles.row_block(num_rows) for num_rows in (0, 1, 16, 17, 64)] == [16, 16, 16, 32, 64]
    assert [triton_tiles.row_block(num_rows) for num_rows in (65, 5000)] == [BLOCKS[-1]] * 2


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.ones(2, 32, device=device()), torch.ones(16, 32, device=device())
    for other in (
        weight[:, :16],
        weight.bfloat16(),
        weight[0],
        weight.half(),
        torch.ones(32, 32, device=device())[::2].t(),
    ):
        with pytest.raises(KernelArgumentError):
            triton.linear(x, other)
    with pytest.raises(KernelArgumentError, match="bias"):
        triton.linear(x, weight, torch.ones(32, device=device()))
