"""Memory of KV caches: committed when it is written, given back when nobody reads it again."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from outrider.engine.zeroed_memory import give_back, zeros

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


def test_less_than_a_page_stays() -> None:
    small = zeros((3,), torch.float32, torch.device("cpu"))
    small.fill_(1.0)
    give_back(small)
    assert small.tolist() == [1.0, 1.0, 1.0]
