"""Many linears of one shape in one call, each with rows of its own: bf16, on panels (cpu_panels), for the same CPUs.

For the heads of latent attention: 128 calls would take as long as the products themselves (128 linears of 512 x 128,
one row, 1 core of an AMD EPYC, weights in cache: 1.7 -> 0.7 ms). Each has the bits of cpu_panels.linear. Needs numba.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import carray, njit

from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear import cpu_panel_amx as amx
from outrider.kernels.linear import cpu_panel_coding as coding
from outrider.kernels.linear import cpu_panel_tiles as tiles
from outrider.kernels.linear import cpu_panels
from outrider.kernels.linear.cpu_panels import Panels


@dataclass(frozen=True)
class PanelBatch:
    """B packed weights [N, K]."""

    linears: tuple[Panels, ...]
    calls: np.ndarray  # of cpu_panel_tiles.Call [B]: what does not depend on the rows


def supports(dtype: torch.dtype, num_inputs: int) -> bool:
    """Returns whether weights of this dtype and width can be packed on this machine."""
    return cpu_panels.supports(dtype) and num_inputs % 2 == 0


def pack(weights: torch.Tensor) -> PanelBatch:
    """A copy of weights bf16 [B, N, K] in panels, none of them coded."""
    linears = tuple(cpu_panels.pack(weight, coded=False) for weight in weights)
    num_outputs, num_inputs = weights.shape[1:]
    calls = np.zeros(len(linears), tiles.Call)
    calls["panels"] = [packed.panels.data_ptr() for packed in linears]
    calls["panel_stride"] = linears[0].panels[0].nbytes
    calls["num_outputs"], calls["num_inputs"] = num_outputs, num_inputs
    calls["block_inputs"] = cpu_panels.block_of(num_inputs)
    return PanelBatch(linears, calls)


def linears(x: torch.Tensor, packed: PanelBatch, out: torch.Tensor) -> None:
    """out[b] = linear b of x[b]: x bf16 [B, T, K], out bf16 [B, T, N], both contiguous in their last dimension.

    Raises KernelArgumentError for other shapes, dtypes and strides.
    """
    first = packed.linears[0]
    num_linears, num_rows, num_outputs, num_inputs = (
        len(packed.linears),
        x.shape[1],
        first.num_outputs,
        first.num_inputs,
    )
    for name, tensor, width in (("x", x, num_inputs), ("out", out, num_outputs)):
        fits = tensor.shape == (num_linears, num_rows, width) and tensor.dtype == torch.bfloat16
        if not fits or tensor.stride(2) != 1 or tensor.device.type != "cpu":
            expected = f"bfloat16 {[num_linears, num_rows, width]} on the CPU, contiguous in its last dimension"
            raise KernelArgumentError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {expected}")
    if num_rows == 0:
        return
    threads = cpu_panels.num_threads(num_linears * num_outputs * num_inputs, num_rows)
    calls = packed.calls.copy()
    for name, tensor in (("x", x), ("out", out)):
        calls[name] = tensor.data_ptr() + 2 * tensor.stride(0) * np.arange(num_linears)
        calls[f"{name}_stride"] = 2 * tensor.stride(1)
    calls["num_rows"] = num_rows
    calls["scratch"] = cpu_team.scratch(amx.SCRATCH_BYTES if first.amx else tiles.SCRATCH_BYTES, threads)
    records = (tiles.CallRecord * num_linears).from_buffer(calls)
    num_units = num_linears * len(first.panels)
    entry = _run_panel_amx if first.amx else _run_panel
    cpu_team.run(cpu_team.Work(entry, records, (out,), (x,), num_units, threads))


@njit
def _find(address, unit):  # type: ignore[no-untyped-def]
    """The unit's place in the batch, and its panel."""
    panels_per_call = (carray(address, 1, tiles.Call)[0].num_outputs + coding.PANEL_COLUMNS - 1) // coding.PANEL_COLUMNS
    return unit // panels_per_call, unit % panels_per_call


@njit
def _run_panel(address, unit, thread):  # type: ignore[no-untyped-def]
    place, panel = _find(address, unit)
    tiles.run_call(carray(address, place + 1, tiles.Call)[place], panel, thread)


@njit
def _run_panel_amx(address, unit, thread):  # type: ignore[no-untyped-def]
    place, panel = _find(address, unit)
    amx.run_call(carray(address, place + 1, tiles.Call)[place], panel, thread)
