"""benchmarks.packed.router_flips packs the same model but for rounding, and compares choices row by row."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.packed.router_flips import run, write_packed
from tests.engine.tiny_models import SERVED, save_tiny_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "sliding_window": None}


def test_fewer_bits_change_more_choices(tmp_path: Path) -> None:
    kind, arguments = SERVED["mixtral"]
    plain = save_tiny_model(kind, arguments | SIZES, tmp_path / "plain")
    pieces = torch.randint(3, 101, (4, 65), generator=torch.Generator().manual_seed(1)).tolist()
    right, perplexity = run(plain, pieces)
    assert right.shape == (2, 256, 4)
    assert bool((right.sum(2) == 2).all())
    changed = []
    for num_bits in (8, 5, 3):
        write_packed(plain, tmp_path / f"w{num_bits}", num_bits)
        choices, packed_perplexity = run(tmp_path / f"w{num_bits}", pieces, dtype="float32")
        changed.append(float((choices != right).any(2).float().mean()))
        assert abs(packed_perplexity / perplexity - 1) < 0.1 * 2 ** (8 - num_bits)
    assert changed[0] < 0.05
    assert changed[0] <= changed[1] < changed[2]
