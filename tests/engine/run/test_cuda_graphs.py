"""Captures of CUDA graphs while graphs of an earlier model wait for the garbage collector."""

from __future__ import annotations

import gc

import pytest
import torch

from outrider.engine.run.cuda_graphs import captured_graph

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: graphs are captured on one")


def test_a_capture_survives_garbage_that_holds_a_graph() -> None:
    device = torch.device("cuda")
    x = torch.ones(8, device=device)
    left = [captured_graph(lambda: x.add_(1), device)]
    left.append(left)  # a cycle: only the collector frees it
    del left
    found = []

    def compute() -> None:
        found[:] = [x * 2]
        for _ in range(gc.get_threshold()[0] + 1):
            cycle: list[object] = []
            cycle.append(cycle)

    captured_graph(compute, device).replay()
    torch.cuda.synchronize()
    assert torch.equal(found[0], x * 2)
