"""8-bit codes of keys and values: the reference against torch's own numbers, the kernels against the reference."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.kv_codes.layout import LARGEST_CODE, head_bytes, is_coded, parts_of, scales_of, view_codes
from outrider.kernels.kv_codes.reference import decode, encode
from outrider.kernels.kv_write import cpu, reference
from outrider.kernels.kv_write import triton as on_gpu
from tests.kernels.paged_attention.paged_cases import coded, empty_codes
from tests.kernels.triton_device import device

pytestmark = pytest.mark.gpu

NUM_HEADS, NUM_ROWS = 3, 25
E4M3 = torch.float8_e4m3fn
KERNELS = {"cpu": (cpu, torch.device("cpu")), "triton": (on_gpu, device())}
each_dtype = pytest.mark.parametrize("dtype", LARGEST_CODE, ids=str)
each_kernel = pytest.mark.parametrize(("kernels", "place"), KERNELS.values(), ids=KERNELS)


def hard_rows(dim: int, seed: int = 0) -> torch.Tensor:
    """[NUM_ROWS, NUM_HEADS, dim]: of many sizes; zeros, tiny ones, ties, one large element, powers from 2^-40 on."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(NUM_ROWS, NUM_HEADS, dim, generator=generator)
    rows *= torch.randn(NUM_ROWS, NUM_HEADS, 1, generator=generator).mul(4).exp()
    rows[0] = 0.0
    rows[1] = 1e-44
    rows[2] = torch.arange(dim) + 0.5
    rows[2, :, 0] = 127.0  # scale 1: every element is a tie
    rows[3, :, 1:] *= 1e-5
    rows[4] = 2.0 ** -(torch.arange(dim) % 41.0)
    rows[5] = -rows[4]
    return rows


# ---- the reference ----


def test_every_code_is_its_own_code() -> None:
    """The finite values of either type, with a scale of exactly 1."""
    every = torch.arange(256, dtype=torch.uint8)
    for dtype, largest in LARGEST_CODE.items():
        values = every.view(dtype).float()
        values = values[values.abs() <= largest]  # without e4m3's NaN, and without -128
        codes, scales = encode(values, dtype)
        assert (scales.item(), len(values)) == (1.0, 254 if dtype == E4M3 else 255)
        assert torch.equal(codes.float(), values)


@each_dtype
def test_the_nearest_code_within_the_stated_error(dtype: torch.dtype) -> None:
    rows = hard_rows(64)[2:]
    codes, scales = encode(rows, dtype)
    wide, amax = rows.double(), rows.double().abs().amax(-1, keepdim=True)
    error = (codes.double() * scales[..., None].double() - wide).abs()
    bound = amax / 254 if dtype == torch.int8 else torch.maximum(wide.abs() / 16, amax / (448 * 1024))
    assert bool((error <= bound + wide.abs() * 2.0**-22).all())
    assert float((error / bound.clamp(min=1e-300)).max()) > 0.9, "a tighter bound would hold"


@each_dtype
def test_a_row_that_is_not_finite_has_no_scale(dtype: torch.dtype) -> None:
    for poison in (torch.inf, -torch.inf, torch.nan):
        _codes, scales = encode(torch.tensor([[1.0, poison], [1.0, 2.0]]), dtype)
        assert scales.isnan().tolist() == [True, False]


def test_a_cache_without_room_for_scales_is_refused() -> None:
    for cache in (torch.zeros(2, 2, 16, 64, dtype=torch.int8), torch.zeros(2, 2, 16, 64)):
        with pytest.raises(KernelArgumentError, match="no scales beside its codes"):
            scales_of(cache)


@pytest.mark.parametrize(("block_size", "dim"), [(16, 128), (5, 43), (1, 16)])
def test_scales_and_codes_share_no_byte(block_size: int, dim: int) -> None:
    memory = torch.zeros(3, 2, head_bytes(block_size, dim), dtype=torch.uint8)
    codes = view_codes(memory, block_size, dim, torch.int8)
    scales_of(codes).fill_(1.0)
    assert not codes.any()
    codes.fill_(7)
    assert bool((scales_of(codes) == 1.0).all())


# ---- the kernels ----


# (block_size, head_dim, value_dim); the interpreter is slow.
LAYOUTS = {cpu: ((16, 64, 64), (5, 43, 21), (1, 16, 128)), on_gpu: ((5, 43, 21),)}


@each_kernel
@each_dtype
@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_write_and_move_agree_with_the_reference(
    kernels: ModuleType, place: torch.device, dtype: torch.dtype, rows_dtype: torch.dtype
) -> None:
    for block_size, head_dim, value_dim in LAYOUTS[kernels]:
        num_blocks = -(-60 // block_size)
        shapes = [(num_blocks, NUM_HEADS, block_size, dim) for dim in (head_dim, value_dim)]
        ours, theirs = ([empty_codes(shape, dtype, place) for shape in shapes] for _ in range(2))
        key, value = (hard_rows(dim, seed).to(place, rows_dtype) for seed, dim in enumerate((head_dim, value_dim)))
        slots = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:NUM_ROWS].to(place)
        source, target = slots[:5], torch.cat([slots[1:5], slots[:1]])
        for caches, module in ((ours, kernels), (theirs, reference)):
            module.kv_write(key, value, *caches, slots)
            module.kv_move(*caches, source, target)
        for our, their in zip(ours, theirs, strict=True):
            assert all(same_bytes(a, b) for a, b in zip(parts_of(our), parts_of(their), strict=True))
        stored = decode(ours[0])[slots[6] // block_size, :, slots[6] % block_size]
        torch.testing.assert_close(stored, key[6].double(), rtol=0.07, atol=float(key[6].abs().max()) / 250)


@each_kernel
@each_dtype
def test_padding_goes_nowhere(kernels: ModuleType, place: torch.device, dtype: torch.dtype) -> None:
    caches = [empty_codes((6, NUM_HEADS, 5, 32), dtype, place) for _ in range(2)]
    rows = hard_rows(32)[:3].to(place)
    kernels.kv_write(rows, rows, *caches, torch.tensor([-1, 13, -1], device=place))
    for cache in caches:
        scales = scales_of(cache)
        assert same_bytes(scales[2, :, 3], encode(rows[1], dtype)[1])
        scales[2, :, 3] = torch.nan
        assert bool(scales.isnan().all())


@each_kernel
@each_dtype
def test_poison_makes_its_own_scale_nan(kernels: ModuleType, place: torch.device, dtype: torch.dtype) -> None:
    rows = hard_rows(32)[6:10].to(place)
    rows[0, 1, 31], rows[2, 0, 0] = torch.nan, torch.inf
    cache = empty_codes((6, NUM_HEADS, 5, 32), dtype, place)
    kernels.kv_write(rows, rows, cache, cache, torch.arange(4, device=place))
    found = scales_of(cache)[0, :, :4].isnan().T
    assert found.tolist() == [[False, True, False], [False] * 3, [True, False, False], [False] * 3]


@pytest.mark.parametrize(
    ("key", "slots", "message"),
    [
        (torch.zeros(2, NUM_HEADS, 32), torch.tensor([0, 30]), "outside"),
        (torch.zeros(2, NUM_HEADS, 32), torch.tensor([0, 1], dtype=torch.int32), "int64"),
        (torch.zeros(2, NUM_HEADS, 16), torch.tensor([0, 1]), "do not fit"),
        (torch.zeros(2, NUM_HEADS, 32).half(), torch.tensor([0, 1]), "float16"),
        (torch.zeros(2, 32, NUM_HEADS).transpose(1, 2), torch.tensor([0, 1]), "contiguous"),
    ],
)
def test_refuses(key: torch.Tensor, slots: torch.Tensor, message: str) -> None:
    cache = coded(torch.zeros(6, NUM_HEADS, 5, 32), torch.int8)
    assert is_coded(cache)
    with pytest.raises(KernelArgumentError, match=message):
        cpu.kv_write(key, key, cache, cache, slots)


def same_bytes(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
