"""The recurrent layers' kernels against their references in plain torch, and their rows bit for bit in several calls.

The references compute in fp32 and in the model's dtype, row by row on the host: sums over a key differ in their order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.gpu_report.report import Finding, Part, Run, judged
from outrider.engine.recurrent.rows import StateRows, recurrent_rows
from outrider.kernels.recurrent.gated_delta import reference as gated_delta_reference
from outrider.kernels.recurrent.gated_delta.arguments import GatedDeltaLayer
from outrider.kernels.recurrent.gated_delta.triton import gated_delta
from outrider.kernels.recurrent.gated_norm.arguments import GatedNormLayer
from outrider.kernels.recurrent.mamba2 import reference as mamba2_reference
from outrider.kernels.recurrent.mamba2.arguments import Mamba2Layer
from outrider.kernels.recurrent.mamba2.triton import mamba2
from outrider.kernels.recurrent.rows import LayerStates
from outrider.kernels.recurrent.short_conv import reference as short_conv_reference
from outrider.kernels.recurrent.short_conv.arguments import ShortConvLayer
from outrider.kernels.recurrent.short_conv.triton import short_conv

_NUM_ROWS, _NUM_TAPS, _NUM_LOG_ROWS = 12, 4, 8
_TOLERANCES = {torch.float32: (5e-5, 5e-5), torch.bfloat16: (2.0**-6, 2e-2)}  # relative, absolute


@dataclasses.dataclass(frozen=True)
class _Kind:
    """kernel and reference: (inputs [T, W], layer, states, rows) -> outputs."""

    layer: Any
    kernel: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]
    input_width: int
    num_channels: int
    log_width: int
    state_shape: tuple[int, ...]


def _gated_delta(run: Run, dtype: torch.dtype, *, per_element: bool) -> _Kind:
    heads, dim = ((1, 2), 20) if run.tiny else ((4, 8), 128)
    num_channels = 2 * heads[0] * dim + heads[1] * dim
    num_decays = heads[1] * (dim if per_element else 1)
    layer = GatedDeltaLayer(
        *(*heads, dim, dim), (0.5 * _draw(num_channels, _NUM_TAPS)).to(dtype), -_draw(heads[1]).exp(),
        _draw(num_decays), GatedNormLayer((1 + 0.1 * _draw(dim)).to(dtype), dim, 1e-6, False, True),
    )  # fmt: skip

    def call(function: Any, inputs: torch.Tensor, at: GatedDeltaLayer, *rest: Any) -> torch.Tensor:
        raw, gate = inputs[:, : layer.raw_width], inputs[:, layer.raw_width :]
        attended: torch.Tensor = function(raw.contiguous(), gate.contiguous(), at, *rest)
        return attended

    return _Kind(
        layer, functools.partial(call, gated_delta), functools.partial(call, gated_delta_reference.gated_delta),
        layer.raw_width + heads[1] * dim, num_channels, layer.raw_width, (heads[1], dim, dim),
    )  # fmt: skip


def _mamba2(run: Run, dtype: torch.dtype) -> _Kind:
    num_heads, dim, size = (3, 24, 20) if run.tiny else (32, 64, 128)
    num_channels = num_heads * dim + 2 * size
    conv = ShortConvLayer((0.5 * _draw(num_channels, _NUM_TAPS)).to(dtype), _draw(num_channels).to(dtype))
    rates, biases, skip = -_draw(num_heads).exp(), _draw(num_heads).to(dtype), _draw(num_heads)
    layer = Mamba2Layer(num_heads, dim, 1, size, conv, rates, biases, skip)
    width = num_channels + num_heads
    return _Kind(layer, mamba2, mamba2_reference.mamba2, width, num_channels, width, (num_heads, size, dim))


def _short_conv(run: Run, dtype: torch.dtype) -> _Kind:
    width = 100 if run.tiny else 2048
    layer = ShortConvLayer(_draw(width, _NUM_TAPS).to(dtype), _draw(width).to(dtype))
    return _Kind(layer, short_conv, short_conv_reference.short_conv, width, width, width, (0,))


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _placed(layer: Any, device: torch.device) -> Any:
    """The layer's tensors, and those of the layers in it, on the device."""
    if isinstance(layer, torch.Tensor):
        return layer.to(device)
    if not dataclasses.is_dataclass(layer):
        return layer
    fields = {each.name: _placed(getattr(layer, each.name), device) for each in dataclasses.fields(layer)}
    return dataclasses.replace(layer, **fields)  # type: ignore[type-var]


def _outputs(kind: _Kind, inputs: torch.Tensor, *, cuts: bool, is_reference: bool = False) -> torch.Tensor:
    """Of all rows: in one call, or as a prompt, a draft of which two rows are accepted, and a round that replays."""
    device, dtype, count = inputs.device, inputs.dtype, len(inputs)
    states = LayerStates(
        torch.zeros((3, _NUM_TAPS - 1, kind.num_channels), dtype=dtype, device=device),
        torch.zeros((3, *kind.state_shape), device=device),
        torch.zeros((3, _NUM_LOG_ROWS, kind.log_width), dtype=dtype, device=device),
    )
    function = kind.reference if is_reference else kind.kernel
    layer = _placed(kind.layer, device)

    def call(rows: torch.Tensor, state: StateRows) -> torch.Tensor:
        return function(rows, layer, states, recurrent_rows([state], [len(rows)], [()], device))

    if not cuts:
        return call(inputs, StateRows(None, (), 0, count))
    wrong = inputs[:1]
    prompt = call(inputs[:5], StateRows(None, (), 0, 5))
    drafted = call(torch.cat([inputs[5:8], wrong]), StateRows(0, [0], 1, 1))
    rest = call(inputs[8:], StateRows(1, [0, 1, 2], 2, count - 8))
    return torch.cat([prompt, drafted[:3], rest])


def _measure(make: Callable[[Run, torch.dtype], _Kind], name: str, run: Run) -> Iterable[Finding]:
    worst: dict[str, float] = {}
    is_one_set = True
    for dtype, (rtol, atol) in _TOLERANCES.items():
        kind = make(run, dtype)
        inputs = _draw(_NUM_ROWS, kind.input_width).to(dtype)
        exact = _outputs(kind, inputs, cuts=False, is_reference=True).double()
        placed = inputs.to(run.device)
        whole, cut = (_outputs(kind, placed, cuts=cuts) for cuts in (False, True))
        is_one_set = is_one_set and torch.equal(whole, cut)
        error = ((whole.double().cpu() - exact).abs() / (atol + rtol * exact.abs())).max()
        worst[str(dtype).removeprefix("torch.")] = float(error) if bool(whole.isfinite().all()) else float("inf")
    shown = ", ".join(f"{dtype} {error:.2f}" for dtype, error in worst.items())
    yield judged(name, "error <= 1 tolerance", shown, max(worst.values()) <= 1, **worst)
    measured = "equal" if is_one_set else "not equal"
    yield judged(f"{name}: prompt, draft, replay", "every bit equal", measured, is_one_set)


_KINDS: dict[str, Callable[[Run, torch.dtype], _Kind]] = {
    "gated_delta": functools.partial(_gated_delta, per_element=False),
    "kimi_delta": functools.partial(_gated_delta, per_element=True),
    "mamba2": _mamba2,
    "short_conv": _short_conv,
}
PARTS = [Part("correctness", name, 5.0, functools.partial(_measure, make, name)) for name, make in _KINDS.items()]
