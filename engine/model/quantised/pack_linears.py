"""Quantises a draft head's linears to 8 bits, packed as a quantised target's are.

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
# inputs; number that share one scale, 0.25 bits a weight
_GROUP_INPUTS = 64
_LARGEST_CODE = 127


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
    """Quantises weight [N, K] to 8 bits: the nearest multiples of each group's scale.

    Scales are float16 where that represents all of them.
    """
    num_outputs, num_inputs = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -num_inputs % _GROUP_INPUTS))
    parts = padded.view(num_outputs, -1, _GROUP_INPUTS)
    scales = parts.abs().amax(2) / _LARGEST_CODE
    halves = scales.half().float()
    if bool(((halves - scales).abs() <= scales * 2.0**-11).all()):  # neither too small nor too large for it
        scales = halves
    numbers = torch.where(scales[..., None] > 0, parts / scales[..., None], 0).round()
    numbers = numbers.clamp(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int8).view(num_outputs, -1)[:, :num_inputs]
    return Codes(numbers.contiguous(), scales, torch.arange(num_inputs) // _GROUP_INPUTS)
