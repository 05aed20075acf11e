"""Checkpoints like a given one with other numbers, as training further or a broken run would leave."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def with_noise(folder: Path, to: Path, scale: float = 0.5) -> Path:
    """Adds to each matrix noise of `scale` times its own standard deviation."""
    generator = torch.Generator().manual_seed(5)

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dim() < 2:
            return tensor
        noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * scale
        return (tensor.float() + noise).to(tensor.dtype)

    return _copied(folder, to, changed)


def with_nan(folder: Path, to: Path) -> Path:
    def changed(tensor: torch.Tensor) -> torch.Tensor:
        broken = tensor.clone()
        if broken.is_floating_point():
            broken.view(-1)[0] = math.nan
        return broken

    return _copied(folder, to, changed)


def _copied(folder: Path, to: Path, change) -> Path:  # type: ignore[no-untyped-def]
    shutil.copytree(folder, to)
    [file] = to.glob("*.safetensors")
    save_file({name: change(tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return to
