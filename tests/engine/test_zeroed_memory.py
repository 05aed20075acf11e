"""Memory of KV caches: committed when it is written, given back when nobody reads it again."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from outrider.engine.zeroed_memory import give_back, zeros
from outrider.shared.machine.memory import give_back_freed_memory

MEGABYTE = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not promise zeros")
def test_it_is_committed_at_use_and_given_back() -> None:
    before = resident_bytes()
    whole = zeros((64, MEGABYTE // 2), torch.bfloat16, torch.device("cpu"))
    assert resident_bytes() - before < 8 * MEGABYTE
    view = whole.view(32, 2, -1)[:, 1]  # as latents are of their keys
    whole.fill_(1.0)
    assert resident_bytes() - before > 60 * MEGABYTE
    give_back(view)
    assert resident_bytes() - before < 8 * MEGABYTE
    assert whole[1:-1].count_nonzero() == 0
    whole.fill_(2.0)
    assert whole.min() == 2.0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory otherwise")
def test_memory_that_the_heap_has_used_before_is_not_committed_again() -> None:
    """As hidden states are stored after a model was read: 77 MB of them would be committed at once."""
    largest = torch.ones(7 * MEGABYTE)
    del largest  # glibc takes up to as many bytes from the heap once it is freed
    used = [torch.ones(6 * MEGABYTE) for _each in range(3)]
    kept = torch.ones(MEGABYTE)  # above them: the heap does not shrink
    del used
    give_back_freed_memory()
    before = resident_bytes()
    tensors = [zeros((6 * MEGABYTE,), torch.float32, torch.device("cpu")) for _each in range(3)]
    assert resident_bytes() - before < 8 * MEGABYTE
    assert all(tensor.count_nonzero() == 0 for tensor in tensors)
    assert kept.min() == 1.0


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5, 7)])
def test_every_shape_is_zeros_of_its_own(shape: tuple[int, ...]) -> None:
    ours, other = (zeros(shape, torch.bfloat16, torch.device("cpu")) for _each in range(2))
    assert ours.shape == shape
    assert ours.count_nonzero() == 0
    ours += 1
    assert other.count_nonzero() == 0


def test_less_than_a_page_stays() -> None:
    small = zeros((3,), torch.float32, torch.device("cpu"))
    small.fill_(1.0)
    give_back(small)
    assert small.tolist() == [1.0, 1.0, 1.0]
