"""The arguments of the short convolution, declared once for its callers and for every kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows

_MULTIPLE = 16  # columns; rows of `taps` are padded to it, so that a vector of 16 never ends beyond one


@dataclass(frozen=True)
class ShortConvLayer:
    """One layer's constants; the same for all forwards."""

    weight: torch.Tensor  # model dtype [C, K]; column K - 1 belongs to the row itself
    bias: torch.Tensor | None = None  # model dtype [C]

    @property
    def num_channels(self) -> int:
        return self.weight.shape[0]

    @cached_property
    def taps(self) -> torch.Tensor:
        """float32 [K + 1, C, padded with zeros]: bias, then the weights from the oldest row's to the row's own."""
        columns = self.weight.float().t()
        first = torch.zeros_like(columns[:1]) if self.bias is None else self.bias.float()[None]
        padding = -self.num_channels % _MULTIPLE
        return torch.nn.functional.pad(torch.cat([first, columns]), (0, padding)).contiguous()


class ShortConv(Protocol):
    """A kernel of the short convolution. A row's bits depend on the K - 1 rows before it in its session alone."""

    def __call__(
        self, raw: torch.Tensor, layer: ShortConvLayer, states: LayerStates, rows: RecurrentRows
    ) -> torch.Tensor:
        """raw [T, C] in the model's dtype; returns the convolved rows [T, C] in that dtype, without activation.

        states.state has no elements. Reads rows.slots_in, writes rows.slots_out. Raises KernelArgumentError.
        """


def require_fit(raw: torch.Tensor, layer: ShortConvLayer, states: LayerStates) -> None:
    """Checks raw [T, W], of which the first C columns are convolved. Raises KernelArgumentError."""
    num_channels, num_taps = layer.weight.shape
    fits = states.window.shape[1:] == (num_taps - 1, num_channels) and states.log.shape[2:] == raw.shape[1:]
    if not fits or raw.shape[1] < num_channels:
        shapes = f"window {tuple(states.window.shape)}, log {tuple(states.log.shape)}"
        raise KernelArgumentError(f"raw rows {tuple(raw.shape)} of {num_channels} channels do not fit {shapes}")
    if raw.dtype not in (torch.bfloat16, torch.float32) or {states.window.dtype, states.log.dtype} != {raw.dtype}:
        raise KernelArgumentError(f"raw rows are {raw.dtype}, states {states.window.dtype}: not both bf16 or float32")
    if not (raw.stride(1) == 1 and states.window.is_contiguous() and states.log.is_contiguous()):
        raise KernelArgumentError("raw rows and states must be contiguous")
