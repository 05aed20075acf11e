"""Tiny recurrent layers of every kind, for `recurrent_cases.Driver`. Widths are no multiples of a vector."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from outrider.kernels.recurrent.gated_delta.arguments import GatedDelta, GatedDeltaLayer
from outrider.kernels.recurrent.gated_norm.arguments import GatedNormLayer
from outrider.kernels.recurrent.mamba1.arguments import Mamba1, Mamba1Layer, Project
from outrider.kernels.recurrent.mamba2.arguments import Mamba2, Mamba2Layer
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv.arguments import ShortConv, ShortConvLayer
from tests.kernels.recurrent.recurrent_cases import Driver, Kernel, nan_states

NUM_ROWS = 40
CONV_ROWS = 4


@dataclass(frozen=True)
class Case:
    """A layer under one kernel: its call, the width of its inputs, and the shapes of its states."""

    call: Kernel
    input_width: int
    num_channels: int
    log_width: int
    state_shape: tuple[int, ...]
    dtype: torch.dtype

    def states(self) -> LayerStates:
        return nan_states(CONV_ROWS, self.num_channels, self.state_shape, self.log_width, self.dtype)

    def driver(self) -> Driver:
        return Driver(self.call, self.states())

    def inputs(self, seed: int, num_rows: int = NUM_ROWS) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(num_rows, self.input_width, generator=generator).to(self.dtype)


def gated_delta_layer(
    dtype: torch.dtype, *, key_dim: int = 20, value_dim: int = 24, num_key_heads: int = 3
) -> GatedDeltaLayer:
    """3 key heads, 6 value heads: widths that are no multiples of a vector."""
    generator = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=generator)
    num_heads = 2 * num_key_heads
    num_channels = 2 * num_key_heads * key_dim + num_heads * value_dim
    return GatedDeltaLayer(
        *(num_key_heads, num_heads, key_dim, value_dim),
        conv_weight=(0.5 * draw(num_channels, CONV_ROWS)).to(dtype),
        decay_rate=-draw(num_heads).exp(),
        dt_bias=draw(num_heads),
        norm=GatedNormLayer((1 + 0.1 * draw(value_dim)).to(dtype), value_dim, 1e-6, False, True),
    )


def kimi_delta_layer(dtype: torch.dtype, num_key_heads: int = 3) -> GatedDeltaLayer:
    """A decay for each element of a key."""
    plain = gated_delta_layer(dtype, num_key_heads=num_key_heads)
    dt_bias = torch.randn(plain.num_value_heads * plain.key_dim, generator=torch.Generator().manual_seed(4))
    norm = replace(plain.norm, rounds_first=False, activation="sigmoid")
    return replace(plain, dt_bias=dt_bias, norm=norm, beta_scale=2.0)


def gated_delta_case(kernel: GatedDelta, dtype: torch.dtype, layer: GatedDeltaLayer | None = None) -> Case:
    layer = layer or gated_delta_layer(dtype)
    raw_width, gate_width = layer.raw_width, layer.num_value_heads * layer.value_dim

    def call(inputs: torch.Tensor, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
        raw, gate = inputs.split([raw_width, gate_width], dim=1)
        return kernel(raw.contiguous(), gate.contiguous(), layer, states, rows)

    state_shape = (layer.num_value_heads, layer.key_dim, layer.value_dim)
    return Case(call, raw_width + gate_width, layer.num_channels, raw_width, state_shape, dtype)


def kimi_delta_case(kernel: GatedDelta, dtype: torch.dtype) -> Case:
    return gated_delta_case(kernel, dtype, kimi_delta_layer(dtype))


def ling_delta_case(kernel: GatedDelta, dtype: torch.dtype) -> Case:
    """As Kimi's, with bounded decays."""
    return gated_delta_case(kernel, dtype, replace(kimi_delta_layer(dtype), beta_scale=1.0, decay_bound=-5.0))


def mamba2_layer(
    dtype: torch.dtype,
    dt_bias: float = 0.0,
    *,
    with_bias: bool = True,
    num_groups: int = 2,
    head_dim: int = 24,
    state_size: int = 20,
) -> Mamba2Layer:
    """Three heads for each group."""
    generator = torch.Generator().manual_seed(2)
    draw = partial(torch.randn, generator=generator)
    num_heads = 3 * num_groups
    num_channels = num_heads * head_dim + 2 * num_groups * state_size
    weight = (0.5 * draw(num_channels, CONV_ROWS)).to(dtype)
    bias = draw(num_channels).to(dtype) if with_bias else None
    rates, biases = -draw(num_heads).exp(), (draw(num_heads) + dt_bias).to(dtype)
    skip = draw(num_heads).to(dtype).float()
    return Mamba2Layer(num_heads, head_dim, num_groups, state_size, ShortConvLayer(weight, bias), rates, biases, skip)


def mamba2_case(kernel: Mamba2, dtype: torch.dtype, layer: Mamba2Layer | None = None) -> Case:
    layer = layer or mamba2_layer(dtype)
    width = layer.num_channels + layer.num_heads
    state_shape = (layer.num_heads, layer.state_size, layer.head_dim)

    def call(inputs: torch.Tensor, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
        return kernel(inputs, layer, states, rows)

    return Case(call, width, layer.num_channels, width, state_shape, dtype)


def mamba1_layer(dtype: torch.dtype) -> tuple[Mamba1Layer, Project]:
    """72 channels with states of 20."""
    generator = torch.Generator().manual_seed(5)
    draw = partial(torch.randn, generator=generator)
    conv = ShortConvLayer((0.5 * draw(72, CONV_ROWS)).to(dtype), draw(72).to(dtype))
    weight = (draw(72 + 2 * 20, 72) / 72**0.5).to(dtype)

    def project(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = torch.stack([torch.nn.functional.linear(row, weight) for row in x])
        dt, b, c = torch.split(rows, [72, 20, 20], dim=1)
        return dt, b, c

    return Mamba1Layer(conv, -draw(20, 72).exp(), draw(72).to(dtype).float(), draw(72).to(dtype).float()), project


def mamba1_case(
    kernel: Mamba1, dtype: torch.dtype, layer: Mamba1Layer | None = None, project: Project | None = None
) -> Case:
    if layer is None or project is None:
        layer, project = mamba1_layer(dtype)
    state_size, width = layer.decay_rate.shape

    def call(inputs: torch.Tensor, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
        return kernel(inputs, project, layer, states, rows)

    return Case(call, width, width, width, (1, state_size, width), dtype)


def short_conv_layer(dtype: torch.dtype, num_channels: int = 300) -> ShortConvLayer:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(num_channels, CONV_ROWS, generator=generator).to(dtype)
    return ShortConvLayer(weight, torch.randn(num_channels, generator=generator).to(dtype))


def short_conv_case(kernel: ShortConv, dtype: torch.dtype, layer: ShortConvLayer | None = None) -> Case:
    layer = layer or short_conv_layer(dtype)

    def call(inputs: torch.Tensor, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
        return kernel(inputs, layer, states, rows)

    return Case(call, layer.num_channels, layer.num_channels, layer.num_channels, (0,), dtype)
