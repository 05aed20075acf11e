"""The kernel of a linear whose rows do not depend on each other, by backend, device and dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear as stock_linear
from torch.nn.functional import pad

from outrider.kernels.linear import cpu, cpu_panel_batch, cpu_panels

LinearFunction = Callable[[torch.Tensor], torch.Tensor]
# x [B, T, K], out [B, T, N]: writes the outputs of linear b for the rows x[b] to out[b].
LinearsFunction = Callable[[torch.Tensor, torch.Tensor], None]
_ROW_TILE = 8


def padded_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K], weight [N, K], bias [N] or None; returns [..., N]: the fallback where oneDNN cannot prepack.

    Pads rows to a multiple of eight. Row-invariant only if the BLAS treats these alike: the certificate decides.
    """
    rows = x.reshape(-1, x.shape[-1])
    missing = -len(rows) % _ROW_TILE
    padded = pad(rows, (0, 0, 0, missing)) if missing else rows
    return stock_linear(padded, weight, bias)[: len(rows)].view(*x.shape[:-1], weight.shape[0])


def row_invariant_linear(weight: torch.Tensor, bias: torch.Tensor | None, backend: str = "cpu") -> LinearFunction:
    """A function x [..., K] -> [..., N] for weight [N, K]; it holds the weight or a packed copy.

    backend: "cpu" or "triton", as in engine/model/row_kernels.
    """
    if backend == "triton":
        from outrider.kernels.linear import triton

        plain = weight.contiguous()
        return lambda x: triton.linear(x, plain, bias)
    on_cpu = weight.device.type == "cpu"
    if on_cpu and cpu_panels.supports(weight.dtype) and (bias is None or bias.dtype == weight.dtype):
        panels, whole_bias = cpu_panels.pack(weight), None if bias is None else bias.contiguous()
        return lambda x: cpu_panels.linear(x, panels, whole_bias)
    if not on_cpu or not cpu.supports(weight.dtype):
        return lambda x: padded_linear(x, weight, bias)
    num_outputs, num_inputs = weight.shape
    packed = cpu.pack(weight)
    min_rows = cpu.fewest_rows(num_outputs, num_inputs, weight.dtype)
    return lambda x: cpu.linear(x, packed, bias, min_rows=min_rows)


def row_invariant_linears(weights: torch.Tensor, backend: str = "cpu") -> LinearsFunction:
    """B linears of one shape, weights [B, N, K], without biases: as `row_invariant_linear`, if possible in one call."""
    if backend == "cpu" and weights.device.type == "cpu" and cpu_panel_batch.supports(weights.dtype, weights.shape[2]):
        packed = cpu_panel_batch.pack(weights)
        return lambda x, out: cpu_panel_batch.linears(x, packed, out)
    if backend == "triton":
        from outrider.kernels.linear import triton

        plain = weights.contiguous()
        return lambda x, out: triton.linears(x, plain, out)
    linears = [row_invariant_linear(weight.contiguous(), None, backend) for weight in weights]

    def apply(x: torch.Tensor, out: torch.Tensor) -> None:
        for linear, rows, outputs in zip(linears, x, out, strict=True):
            outputs.copy_(linear(rows.contiguous()))

    return apply
