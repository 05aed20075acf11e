"""Does a lean module compute what the model's own does? Asked of the modules themselves, in fp32, on random data.

No architecture is known by name here: whatever a candidate cannot imitate to rounding stays as transformers wrote it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

# Sound imitations differ by 1e-6 of the largest output; a wrong order, a missing factor or bias by more than 1e-2.
_TOLERANCE = 2e-5
# In bf16, where a unit in the last place is 2^-8: enough to see another rounding step for what it is.
_COARSE_TOLERANCE = 2**-5


def wide_copy(module: torch.nn.Module) -> torch.nn.Module:
    """An fp32 copy whose vectors are disturbed: norms of ones and biases of zeros would hide what they do."""
    copied = copy.deepcopy(module).float()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.device))
    return copied


def is_close(ours: Any, theirs: Any) -> bool:
    """Whether two tensors, or two equal nestings of tensors and plain values, agree to rounding."""
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
    """What decides a module's function, weights aside: modules with equal signatures are checked once."""
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
    """Give the stand-in the plain attributes that other parts of the model may read of the original."""
    for name, value in vars(original).items():
        if not name.startswith("_") and not hasattr(lean, name) and not isinstance(value, torch.Tensor):
            setattr(lean, name, value)
