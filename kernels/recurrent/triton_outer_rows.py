"""A row's contribution to a state of outer products, on an NVIDIA GPU: unit keys, decays, step sizes (triton).

Computed for all rows at once, so that `triton_outer_state`, which walks them one after another, only loads. A row's
numbers depend on that row alone. Minimum traffic at 8 rows of Qwen3.5-9B (Hk 16, dk 128, Hv 32): 0.2 MB, less than a
launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels.recurrent.outer_rules import DELTA, ELEMENTWISE, OuterLayer
from outrider.kernels.recurrent.triton_functions import sigmoid, softplus
from outrider.kernels.triton_numbers import round_to

_NORM_EPS = tl.constexpr(1e-6)  # added to the sum of squares of a query or key; transformers' l2norm
_STEP_BLOCK = 1024  # columns of ELEMENTWISE per program


class ReadyRows(NamedTuple):
    """The numbers of R rows, fp32 [R, ...]; None: the rule does not use them."""

    queries: torch.Tensor | None  # DELTA: [R, Hk, K], of length 1, scaled
    keys: torch.Tensor | None  # DELTA: [R, Hk, K], of length 1
    decays: torch.Tensor | None  # DELTA: [R, H, 1 or K]; SELECTIVE: [R, H]
    steps: torch.Tensor | None  # DELTA: [R, H], beta; SELECTIVE: [R, H]; ELEMENTWISE: [R, V]


@triton.jit
def _unit_keys(  # type: ignore[no-untyped-def]
    mixed, queries, keys, query_scale,
    WIDTH: tl.constexpr, QUERY_AT: tl.constexpr, KEY_AT: tl.constexpr, NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, PADDED_KEY_DIM: tl.constexpr,
):  # fmt: skip
    """Grid (R, Hk)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element = tl.arange(0, PADDED_KEY_DIM)
    is_key = element < KEY_DIM
    source = mixed + row * WIDTH + head * KEY_DIM + element
    target = (row * NUM_KEY_HEADS + head) * KEY_DIM + element
    query = tl.load(source + QUERY_AT, mask=is_key, other=0.0).to(tl.float32)
    query = query * tl.rsqrt(tl.sum(query * query, 0) + _NORM_EPS) * query_scale
    tl.store(queries + target, query, mask=is_key)
    key = tl.load(source + KEY_AT, mask=is_key, other=0.0).to(tl.float32)
    tl.store(keys + target, key * tl.rsqrt(tl.sum(key * key, 0) + _NORM_EPS), mask=is_key)


@triton.jit
def _steps(  # type: ignore[no-untyped-def]
    mixed, decay_rate, dt_bias, decays, steps, beta_scale, decay_bound,
    WIDTH: tl.constexpr, STEP_AT: tl.constexpr, BETA_AT: tl.constexpr, NUM_STEPS: tl.constexpr,
    NUM_HEADS: tl.constexpr, RULE: tl.constexpr, IS_BOUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R, blocks of steps)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_step = place < NUM_STEPS
    step = tl.load(mixed + row * WIDTH + STEP_AT + place, mask=is_step, other=0.0).to(tl.float32)
    step += tl.load(dt_bias + place, mask=is_step, other=0.0)
    if RULE == 0:
        rate = tl.load(decay_rate + place // (NUM_STEPS // NUM_HEADS), mask=is_step, other=0.0)
        power = decay_bound * sigmoid(-rate * step) if IS_BOUND else rate * softplus(step)
        tl.store(decays + row * NUM_STEPS + place, tl.exp(power), mask=is_step)
        is_head = place < NUM_HEADS
        beta = tl.load(mixed + row * WIDTH + BETA_AT + place, mask=is_head, other=0.0).to(tl.float32)
        beta = round_to(sigmoid(beta), mixed.dtype.element_ty).to(tl.float32) * beta_scale
        tl.store(steps + row * NUM_HEADS + place, beta, mask=is_head)
    else:
        step = softplus(round_to(step, mixed.dtype.element_ty).to(tl.float32))
        step = round_to(step, mixed.dtype.element_ty).to(tl.float32)
        tl.store(steps + row * NUM_STEPS + place, step, mask=is_step)
        if RULE == 1:
            rate = tl.load(decay_rate + place, mask=is_step, other=0.0)
            tl.store(decays + row * NUM_STEPS + place, tl.exp(rate * step), mask=is_step)


def prepare(mixed: torch.Tensor, layer: OuterLayer, num_heads: int, key_dim: int) -> ReadyRows:
    """mixed [R, W] as of `short_conv.triton.mixed_rows`, R > 0."""
    num_rows, width = mixed.shape
    num_steps, num_key_heads, columns, rule = layer.dt_bias.shape[0], layer.num_key_heads, layer.columns, layer.rule

    def new(*shape: int) -> torch.Tensor:
        return mixed.new_empty((num_rows, *shape), dtype=torch.float32)

    queries = keys = decays = None
    if rule == DELTA:
        queries, keys = new(num_key_heads, key_dim), new(num_key_heads, key_dim)
        _unit_keys[(num_rows, num_key_heads)](
            mixed, queries, keys, layer.query_scale,
            WIDTH=width, QUERY_AT=columns.query, KEY_AT=columns.key, NUM_KEY_HEADS=num_key_heads,
            KEY_DIM=key_dim, PADDED_KEY_DIM=triton.next_power_of_2(key_dim), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    if rule != ELEMENTWISE:
        decays = new(num_steps)
    steps = new(num_heads if rule == DELTA else num_steps)
    block = min(_STEP_BLOCK, triton.next_power_of_2(num_steps))
    _steps[(num_rows, triton.cdiv(num_steps, block))](
        mixed, layer.decay_rate, layer.dt_bias, steps if decays is None else decays, steps, layer.beta_scale,
        layer.decay_bound,
        WIDTH=width, STEP_AT=columns.step, BETA_AT=columns.beta, NUM_STEPS=num_steps, NUM_HEADS=num_heads,
        RULE=rule, IS_BOUND=layer.decay_bound != 0, BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return ReadyRows(queries, keys, decays, steps)
