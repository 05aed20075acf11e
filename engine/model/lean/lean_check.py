"""Checks that a lean module computes what the model's own does: compared in fp32, on random data, to rounding.

No architecture is known by name here.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from outrider.engine.model.coded_weights import CodedLinear

# relative to the largest output; largest difference in fp32; correct modules differ by 1e-6, a missing factor or bias
# by more than 1e-2
_TOLERANCE = 2e-5
# relative to the largest output; largest difference in bf16 (ulp 2^-8); allows for another rounding step
_COARSE_TOLERANCE = 2**-5


def wide_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Returns an fp32 copy with perturbed vectors: norms of ones and biases of zeros would hide errors."""
    copied = plain_copy(module, torch.float32).float()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.device))
    return copied


def plain_copy(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Returns a copy whose coded linears are dequantised."""
    plain = {id(part): part.plain(dtype) for part in module.modules() if isinstance(part, CodedLinear)}
    return copy.deepcopy(module, dict(plain))


def with_weights(module: torch.nn.Module) -> set[str]:
    """Returns the names of the children that have weights."""
    return {
        name
        for name, child in module.named_children()
        if list(child.parameters()) or any(isinstance(part, CodedLinear) for part in child.modules())
    }


def is_close(ours: Any, theirs: Any) -> bool:
    """Returns whether two tensors, or two equal nestings of tensors and plain values, agree to rounding."""
    if isinstance(theirs, torch.Tensor):
        if not isinstance(ours, torch.Tensor) or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return False
        scale = max(float(theirs.abs().max()), 1e-6) if theirs.numel() else 1.0
        tolerance = _TOLERANCE if theirs.dtype == torch.float32 else _COARSE_TOLERANCE
        return bool((ours - theirs).abs().max() <= tolerance * scale) if theirs.numel() else True
    if isinstance(theirs, tuple | list):
        return len(ours) == len(theirs) and all(map(is_close, ours, theirs))
    return bool(ours == theirs)


def signature(module: torch.nn.Module) -> tuple[Any, ...]:
    """Returns all that decides a module's function but its weights; modules with equal signatures are checked once."""
    parts: list[Any] = []
    for name, part in module.named_modules():
        plain = {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, bool | int | float | str) and key != "layer_idx"
        }
        shapes = [(key, tuple(found.shape)) for key, found in part._parameters.items() if found is not None]
        parts.append((name, type(part), tuple(sorted(plain.items())), tuple(shapes)))
    return tuple(parts)


def carry_over(original: torch.nn.Module, lean: torch.nn.Module) -> None:
    """Copies the plain attributes of the original that other parts of the model may read."""
    for name, value in vars(original).items():
        if not name.startswith("_") and not hasattr(lean, name) and not isinstance(value, torch.Tensor):
            setattr(lean, name, value)
