"""Quantises a draft head's linears to 4 bits, packed as a quantised target's are.

Lossless: a head with other weights may draft other tokens, but what is emitted does not depend on the drafts. Not here:
the packed linears (engine/model/coded_weights, kernels/linear).
"""

from __future__ import annotations

from functools import partial

import torch

from outrider.engine.attention.ops import AttentionOps
from outrider.engine.model.coded_weights import CodedLinear, Waiting
from outrider.engine.model.row_kernels import resolve_code_kernels
from outrider.kernels.linear.codes import Codes

# weights; smallest head that is packed; a smaller one stays in the cores' caches (L2: 1 to 2 MB each), where bf16 is as
# fast
_LEAST_WEIGHTS = 4_000_000
# inputs; number that share one scale, 0.5 bits a weight; the integer arithmetic of kernels/linear/int8 takes up to 32
_GROUP_INPUTS = 32
_LOWEST_CODE, _HIGHEST_CODE = -8, 7
# shares of a group's largest number that its highest code may stand for; the best is taken, as most groups lose less by
# cutting one number off than by coarser steps for all
_SHARES = (1.0, 0.9, 0.8)
# weights; quantised at once, in several times their memory
_SLAB_WEIGHTS = 1 << 24


@torch.inference_mode()
def pack_linears(head: torch.nn.Module, ops: AttentionOps, dtype: torch.dtype, device: torch.device) -> int:
    """Replaces the linears in place, in memory that is not shared; returns their number.

    They are packed when the head is made lean and row-invariant. Returns 0 if the head is small or the machine has no
    kernels for codes on a CPU.
    """
    linears = [(name, part) for name, part in head.named_modules() if _takes(part)]
    kernels = resolve_code_kernels(ops.row_backend, dtype, device) if device.type == "cpu" else None
    if kernels is None or sum(linear.weight.numel() for _, linear in linears) < _LEAST_WEIGHTS:
        return 0
    for name, linear in linears:
        weight: torch.Tensor = linear.weight.detach()
        waiting = Waiting("", f"{name}.weight", tuple(weight.shape), partial(coded, weight))
        parent, _, child = name.rpartition(".")
        setattr(head.get_submodule(parent), child, CodedLinear(linear, waiting, kernels))
    return len(linears)


def _takes(module: torch.nn.Module) -> bool:
    is_linear = isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward
    return is_linear and module.weight.dim() == 2  # type: ignore[operator]


def coded(weight: torch.Tensor) -> Codes:
    """Returns the weight [N, K] in 4 bits: multiples of a scale for each group, with the smallest squared error.

    The scales are float16 numbers where float16 holds those of all outputs quantised at once.
    """
    num_inputs = weight.shape[1]
    slabs = [_quantised(slab) for slab in torch.split(weight, max(1, _SLAB_WEIGHTS // num_inputs))]
    scales, numbers = (torch.cat(parts) for parts in zip(*slabs, strict=True))
    return Codes(numbers, scales, torch.arange(num_inputs) // _GROUP_INPUTS)


def _quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales float32 [N, G] and codes int8 [N, K]."""
    num_outputs, num_inputs = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -num_inputs % _GROUP_INPUTS))
    parts = padded.view(num_outputs, -1, _GROUP_INPUTS)
    largest = parts.abs().amax(2)
    best_error = torch.full_like(largest, torch.inf)
    best_scales, best_codes = torch.zeros_like(largest), torch.zeros_like(parts)
    for share in _SHARES:
        scales = _rounded(largest * (share / _HIGHEST_CODE))
        codes = torch.where(scales[..., None] > 0, parts / scales[..., None], 0)
        codes = codes.round_().clamp_(_LOWEST_CODE, _HIGHEST_CODE)
        error = (codes * scales[..., None] - parts).square_().sum(2)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best_scales = torch.where(is_better, scales, best_scales)
        best_codes = torch.where(is_better[..., None], codes, best_codes)
    return best_scales, best_codes.to(torch.int8).view(num_outputs, -1)[:, :num_inputs].contiguous()


def _rounded(scales: torch.Tensor) -> torch.Tensor:
    """Returns the scales rounded to float16, in float32; unchanged where one is too small or too large for it."""
    halves = scales.half().float()
    return halves if bool(((halves - scales).abs() <= scales * 2.0**-11).all()) else scales
