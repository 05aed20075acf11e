"""Cache writes and moves against the reference, byte for byte; the GPU's kernel is interpreted where no GPU is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.kv_write import cpu, reference, triton
from tests.kernels.triton_device import device

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
KERNELS = pytest.mark.parametrize(("kernel", "on"), [(cpu, CPU), (triton, device())], ids=["cpu", "triton"])
NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE = 6, 3, 5


def draw(*shape: int, on: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).to(on, dtype)


def make_caches(head_dim: int, value_dim: int, dtype: torch.dtype, on: torch.device) -> list[torch.Tensor]:
    """Keys and values as halves of one tensor, so that no stride follows from the shape."""
    wide = draw(NUM_BLOCKS, 2, NUM_HEADS, BLOCK_SIZE, head_dim + 3, on=on, dtype=dtype)
    return [wide[:, 0, :, :, :head_dim], wide[:, 1, :, :, :value_dim]]


def slots_on(on: torch.device, *slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64, device=on)


def both(caches: list[torch.Tensor], act: Callable[..., None], expect: Callable[..., None]) -> None:
    theirs = [cache.clone() for cache in caches]
    before = [cache.clone() for cache in caches]
    act(*caches)
    expect(*theirs)
    assert all(torch.equal(a, b) for a, b in zip(caches, theirs, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


@KERNELS
@pytest.mark.parametrize("num_rows", [1, 7, 30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 16), (43, 21), (128, 128)])
def test_write_agrees_with_reference(
    kernel: Any, on: torch.device, num_rows: int, dtype: torch.dtype, head_dim: int, value_dim: int
) -> None:
    # Keys and values as a model hands them over: slices of one wider tensor.
    wide = draw(num_rows, NUM_HEADS * 3, head_dim, on=on, dtype=dtype)
    key, value = wide[:, NUM_HEADS : 2 * NUM_HEADS], wide[:, 2 * NUM_HEADS :, :value_dim]
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(1))[:num_rows].to(on)
    both(
        make_caches(head_dim, value_dim, dtype, on),
        lambda k, v: kernel.kv_write(key, value, k, v, slots),
        lambda k, v: reference.kv_write(key, value, k, v, slots),
    )


@KERNELS
def test_write_puts_each_row_where_its_slot_says(kernel: Any, on: torch.device) -> None:
    key_cache, value_cache = make_caches(16, 16, torch.float32, on)
    key, value = draw(2, NUM_HEADS, 16, on=on), draw(2, NUM_HEADS, 16, on=on) + 1
    kernel.kv_write(key, value, key_cache, value_cache, slots_on(on, 13, 0))
    assert torch.equal(key_cache[2, :, 3], key[0])
    assert torch.equal(value_cache[2, :, 3], value[0])
    assert torch.equal(key_cache[0, :, 0], key[1])


@KERNELS
def test_padding_goes_nowhere(kernel: Any, on: torch.device) -> None:
    rows = draw(4, NUM_HEADS, 16, on=on)
    # A slot behind the cache is padding on the GPU alone; the CPU's kernel refuses it.
    slots = slots_on(on, 13, -1, 0, 30 if kernel is triton else -1)
    both(
        make_caches(16, 16, torch.float32, on),
        lambda k, v: kernel.kv_write(rows, rows, k, v, slots),
        lambda k, v: reference.kv_write(rows[[0, 2]], rows[[0, 2]], k, v, slots_on(on, 13, 0)),
    )


@KERNELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_move_reads_all_before_it_writes(kernel: Any, on: torch.device, dtype: torch.dtype) -> None:
    source, target = (3, 4, 5, 6, 29), (4, 5, 6, 3, 0)
    both(
        make_caches(18, 21, dtype, on),
        lambda k, v: kernel.kv_move(k, v, slots_on(on, -1, *source), slots_on(on, -1, *target)),
        lambda k, v: reference.kv_move(k, v, slots_on(on, *source), slots_on(on, *target)),
    )


def test_the_reference_moves_a_latent_once() -> None:
    """The values are a view of the keys: they must not be moved again after the keys were."""
    keys = torch.arange(4.0)[None, None, :, None].expand(1, 1, 4, 16).clone()
    reference.kv_move(keys, keys[..., :8], torch.tensor([1, 2]), torch.tensor([0, 1]))
    assert keys[0, 0, :, 0].tolist() == [1, 2, 2, 3]


@KERNELS
def test_nan_payloads_survive(kernel: Any, on: torch.device) -> None:
    pattern = torch.tensor([0x7FC1, -63, 0x7F81, -1] * 4, dtype=torch.int16, device=on)
    rows = pattern.view(torch.bfloat16).expand(1, NUM_HEADS, 16)
    caches = make_caches(16, 16, torch.bfloat16, on)
    kernel.kv_write(rows, rows, caches[0], caches[1], slots_on(on, 7))
    for cache in caches:
        assert torch.equal(cache[1, :, 2].contiguous().view(torch.int16), pattern.expand(NUM_HEADS, 16))


@KERNELS
def test_nothing_to_do(kernel: Any, on: torch.device) -> None:
    caches = make_caches(16, 16, torch.float32, on)
    before, rows = caches[0].clone(), draw(0, NUM_HEADS, 16, on=on)
    kernel.kv_write(rows, rows, caches[0], caches[1], slots_on(on))
    kernel.kv_move(caches[0], caches[1], slots_on(on), slots_on(on))
    assert torch.equal(caches[0], before)


@KERNELS
@pytest.mark.parametrize(
    ("key", "slots", "message"),
    [
        (torch.zeros(2, NUM_HEADS, 16), torch.tensor([0, 1], dtype=torch.int32), "int64"),
        (torch.zeros(2, NUM_HEADS, 16), torch.tensor([0]), "do not fit"),
        (torch.zeros(2, NUM_HEADS, 16).bfloat16(), torch.tensor([0, 1]), "must agree"),
        (torch.zeros(2, 16, NUM_HEADS).transpose(1, 2), torch.tensor([0, 1]), "contiguous"),
    ],
)
def test_refuses(kernel: Any, on: torch.device, key: torch.Tensor, slots: torch.Tensor, message: str) -> None:
    caches = make_caches(16, 16, torch.float32, on)
    with pytest.raises(KernelArgumentError, match=message):
        kernel.kv_write(key.to(on), key.to(on), caches[0], caches[1], slots.to(on))


@pytest.mark.parametrize("outside", [30, -2])
def test_the_cpu_refuses_slots_outside_the_cache(outside: int) -> None:
    rows, caches = torch.zeros(2, NUM_HEADS, 16), make_caches(16, 16, torch.float32, CPU)
    with pytest.raises(KernelArgumentError, match="outside"):
        cpu.kv_write(rows, rows, caches[0], caches[1], torch.tensor([0, outside]))
