"""The memory layout of a cache of 8-bit codes and their scales. Needs torch alone.

A coded cache is a tensor of codes, [num_blocks, num_kv_heads, block_size, dim], int8 or float8_e4m3fn. Its strides
leave room: the scales of a block's head, fp32 [block_size], follow its codes in the same memory. So a cache is one
tensor in every signature, a row and its scale share a page, and rows stay aligned for a GPU's wide loads.
Not here: what the codes of a row are (`reference`).
"""

from __future__ import annotations

import torch

from outrider.kernels.errors import KernelArgumentError

# largest magnitude of a code: the largest finite e4m3; -128 is left out, so that codes are symmetric
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SCALE_BYTES = 4
_ALIGNMENT = 16  # bytes; a GPU thread's widest load


def is_coded(cache: torch.Tensor) -> bool:
    """Returns whether a cache holds codes with scales."""
    return cache.dtype in LARGEST_CODE


def code_bytes(block_size: int, dim: int) -> int:
    """Bytes from the first code of a block's head to its scales."""
    return -(-block_size * dim // _ALIGNMENT) * _ALIGNMENT


def head_bytes(block_size: int, dim: int) -> int:
    """Bytes of one head of a block: codes, then scales."""
    return code_bytes(block_size, dim) + -(-SCALE_BYTES * block_size // _ALIGNMENT) * _ALIGNMENT


def view_codes(memory: torch.Tensor, block_size: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The coded cache in contiguous memory, uint8 [num_blocks, num_kv_heads, head_bytes(block_size, dim)]."""
    return memory.view(dtype)[..., : block_size * dim].view(*memory.shape[:-1], block_size, dim)


def scales_of(cache: torch.Tensor) -> torch.Tensor:
    """The scales of a coded cache, fp32 [num_blocks, num_kv_heads, block_size], as a view of the same memory.

    Raises KernelArgumentError for a tensor that view_codes did not make.
    """
    num_blocks, num_heads, block_size, dim = cache.shape
    own = head_bytes(block_size, dim)
    expected = (max(cache.stride(0), num_heads * own), own, dim, 1)
    # torch is free to choose the stride of a dimension of size 1.
    as_expected = all(
        size == 1 or stride == wanted
        for size, stride, wanted in zip(cache.shape, cache.stride(), expected, strict=True)
    )
    if not is_coded(cache) or not as_expected:
        raise KernelArgumentError(f"a {cache.dtype} cache with strides {cache.stride()} has no scales beside its codes")
    scales = cache.view(torch.uint8).as_strided(
        (num_blocks, num_heads, block_size * SCALE_BYTES),
        (expected[0], own, 1),
        cache.storage_offset() + code_bytes(block_size, dim),
    )
    return scales.view(torch.float32)


def parts_of(cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All that a cache of any dtype holds of its slots, as views [num_blocks, num_kv_heads, block_size, ...]: of codes
    these are the codes as bytes, and the scales."""
    return (cache.view(torch.uint8), scales_of(cache)) if is_coded(cache) else (cache,)
