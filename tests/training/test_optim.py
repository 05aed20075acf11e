"""Muon in float32 does what torch's does, which is the oracle, in a time that a CPU without bfloat16 can afford."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.training.optim import Float32Muon, HybridOptimizer, orthogonalized

COEFFICIENTS = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))]).defaults["ns_coefficients"]


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_its_steps_are_torchs(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    start, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(4)]
    ends = []
    for make in (torch.optim.Muon, Float32Muon):
        parameter = nn.Parameter(start.clone())
        optimizer = make([parameter], lr=0.05, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        assert set(optimizer.state[parameter]) == {"momentum_buffer"}  # a run goes on with either
        ends.append(parameter.detach())
    moved = (ends[0] - start).norm()
    assert moved > 0.1
    assert (ends[1] - ends[0]).norm() < 0.03 * moved  # what torch's loses in bfloat16


def test_singular_values_are_near_one() -> None:
    """The coefficients leave them between 0.7 and 1.2, by the method's own account."""
    torch.manual_seed(2)
    values = torch.linalg.svdvals(orthogonalized(torch.randn(20, 60), COEFFICIENTS, 5, 1e-7))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.25


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_the_machine_decides(monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": has_bfloat16})
    head = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)]), "norm": nn.LayerNorm(4)})
    model = nn.ModuleDict({"head": head})
    muon = HybridOptimizer(model, 0.01, 0.01, 0.0).optimizers[0]
    assert type(muon) is (torch.optim.Muon if has_bfloat16 else Float32Muon)
