"""Every kernel of the forward pass against its reference in fp64; the sampling kernels' part is correctness_sampling.

Each measured figure is the largest error as a share of what rounding allows: at most 1 holds. bf16 outputs may be off
by a unit in the last place (2**-8 of the value) and by what their inputs' own rounding makes of intermediate results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_report import correctness_codes, correctness_recurrent, correctness_sampling
from benchmarks.gpu_report.report import Finding, Part, Run, judged
from outrider.kernels.gated_activation import reference as activation_reference
from outrider.kernels.gated_activation.triton import gated_activation
from outrider.kernels.kv_write import reference as write_reference
from outrider.kernels.kv_write.triton import kv_move, kv_write
from outrider.kernels.linear import reference as linear_reference
from outrider.kernels.linear.triton import linear
from outrider.kernels.paged_attention import reference as attention_reference
from outrider.kernels.paged_attention.triton import paged_attention
from outrider.kernels.rms_norm.triton import rms_norm
from outrider.kernels.rotary import reference as rotary_reference
from outrider.kernels.rotary.triton import rotate_
from tests.kernels.paged_cases import Shape, lay_out, random_session, run_kernel

DTYPES = (torch.bfloat16, torch.float32)
_EPS = 1e-5
# What was found, what it is in fp64, and the relative and the absolute error that rounding allows.
Case = tuple[torch.Tensor, torch.Tensor, float, float]


def share_of_tolerance(found: torch.Tensor, exact: torch.Tensor, rtol: float, atol: float) -> float:
    """The largest |found - exact| / (atol + rtol * |exact|); infinite if a found number is not finite."""
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    exact = exact.double()
    return float(((found.double() - exact).abs() / (atol + rtol * exact.abs())).max())


def _part(name: str, cases: Callable[[Run], Iterable[Case]]) -> Part:
    def measure(run: Run) -> Iterable[Finding]:
        worst = dict.fromkeys(DTYPES, 0.0)
        for found, exact, rtol, atol in cases(run):
            worst[found.dtype] = max(worst[found.dtype], share_of_tolerance(found, exact, rtol, atol))
        shown = ", ".join(f"{str(dtype).removeprefix('torch.')} {error:.2f}" for dtype, error in worst.items())
        figures = {str(dtype): error for dtype, error in worst.items()}
        yield judged(name, "error <= 1 tolerance", shown, 0 < max(worst.values()) <= 1, **figures)

    return Part("correctness", name, 5.0, measure)


def _random(run: Run, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator(run.device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=run.device).to(dtype)


# [N, K] and row counts: every kind of tile, few enough that compiling them does not take the report's time.
_LINEARS = {(1000, 1111): (3, 17, 64, 130), (6144, 4096): (8, 64), (10240, 2048): (8,)}


def _linear(run: Run) -> Iterable[Case]:
    for (num_outputs, num_inputs), row_counts in ({(40, 300): (1, 3)} if run.tiny else _LINEARS).items():
        for num_rows, dtype in itertools.product(row_counts, DTYPES):
            x = _random(run, num_rows, num_inputs, dtype=dtype)
            weight = _random(run, num_outputs, num_inputs, dtype=dtype)
            # Row by row: the reference's products are [rows, N, K] in fp64.
            exact = torch.cat([linear_reference.linear(row[None].double(), weight) for row in x])
            # The noise of an fp32 sum beside sums of size sqrt(K) that may cancel to nothing.
            yield linear(x, weight), exact, 2.0**-8 if dtype == torch.bfloat16 else 1e-6, 4e-7 * num_inputs


def _attention(run: Run) -> Iterable[Case]:
    heads = (4, 1) if run.tiny else (32, 8)
    cases: list[tuple[int, int, int | None]] = [(20, 1, None), (29, 5, 2)]
    if not run.tiny:
        cases += [(4000, 8, None), (511, 2, None), (700, 70, None), (1023, 8, 0), (61, 12, 2)]
    for dtype in DTYPES:
        shape = replace(Shape(), num_heads=heads[0], num_kv_heads=heads[1], head_dim=128, value_dim=128, dtype=dtype)
        if run.tiny:
            shape = replace(shape, head_dim=32, value_dim=32)
        sessions = [random_session(shape, *case[:2], seed, case[2]) for seed, case in enumerate(cases)]
        on_host = lay_out(sessions, shape)
        arguments: dict[str, Any] = {
            name: value.to(run.device) if isinstance(value, torch.Tensor) else value for name, value in on_host.items()
        }
        wide = arguments | {"query": arguments["query"].double()}
        for options in ({}, {"sliding_window": 17}, {"softcap": 5.0}):
            exact = run_kernel(attention_reference.paged_attention, wide, options)
            found = run_kernel(paged_attention, arguments, options)
            # In bf16 the weights of the positions are rounded too, to 8 bits, before they meet the values.
            yield found, exact, 2.0**-8 if dtype == torch.bfloat16 else 0.0, 1e-2 if dtype == torch.bfloat16 else 1e-5


def _latents(run: Run) -> Iterable[Case]:
    """One key for all heads, whose first part is the value: DeepSeek-V3's sizes."""
    heads, value_dim, key_dim = (16, 32, 40) if run.tiny else (128, 512, 576)
    cases: list[tuple[int, int, int | None]] = [(20, 1, None), (29, 5, 2)]
    for dtype in DTYPES:
        shape = replace(Shape(), num_heads=heads, num_kv_heads=1, head_dim=key_dim, value_dim=value_dim, dtype=dtype)
        on_host = lay_out([random_session(shape, *case[:2], seed, case[2]) for seed, case in enumerate(cases)], shape)
        arguments: dict[str, Any] = {
            name: value.to(run.device) if isinstance(value, torch.Tensor) else value for name, value in on_host.items()
        }
        arguments["value_cache"] = arguments["key_cache"][..., :value_dim]
        exact = run_kernel(attention_reference.paged_attention, arguments | {"query": arguments["query"].double()})
        found = run_kernel(paged_attention, arguments)
        yield found, exact, 2.0**-8 if dtype == torch.bfloat16 else 0.0, 1e-2 if dtype == torch.bfloat16 else 1e-5


def _copies(run: Run) -> Iterable[Finding]:
    """Exact to the bit, and nothing beside the slots is touched."""
    num_blocks, num_heads, dim, num_rows = (5, 2, 16, 9) if run.tiny else (300, 8, 128, 256)
    slots = torch.randperm(num_blocks * 16, generator=torch.Generator().manual_seed(1)).to(run.device)
    written, sources, targets = slots[:num_rows].clone(), slots[: num_rows - 1], slots[num_rows : 2 * num_rows - 1]
    written[-1] = -1  # padding
    num_wrong = num_moved = 0
    for dtype in DTYPES:
        key = _random(run, num_rows, num_heads, dim, dtype=dtype)
        value = _random(run, num_rows, num_heads, dim + 1, dtype=dtype)[..., :dim]
        found = [_random(run, num_blocks, num_heads, 16, dim, dtype=dtype) for _ in range(2)]
        expected = [cache.clone() for cache in found]
        kv_write(key, value, found[0], found[1], written)
        kv_move(found[0], found[1], sources, targets)
        write_reference.kv_write(key[:-1], value[:-1], expected[0], expected[1], written[:-1])
        write_reference.kv_move(expected[0], expected[1], sources, targets)
        num_wrong += sum(int((left != right).sum()) for left, right in zip(found, expected, strict=True))
        num_moved += 2 * (2 * num_rows - 2) * num_heads * dim
    measured = f"{num_wrong} of {num_moved} copied differ"
    yield judged("kv_write, kv_move", "every element equal", measured, num_wrong == 0)


def _norm(run: Run) -> Iterable[Case]:
    for width in (80,) if run.tiny else (80, 4096, 5120):
        for dtype in DTYPES:
            x, weight = _random(run, 9, width, dtype=dtype), _random(run, width, dtype=dtype)
            for one_plus_weight, rounds_first in ((False, True), (True, False)):
                found = rms_norm(x, weight, _EPS, one_plus_weight=one_plus_weight, rounds_first=rounds_first)
                wide, factor = x.double(), weight.double() + one_plus_weight
                exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS) * factor
                # Two roundings where the normalised row is rounded before it meets the weight.
                yield found, exact, 2.0**-7 if dtype == torch.bfloat16 else 2e-6, 1e-30


def _activation(run: Run) -> Iterable[Case]:
    for dtype in DTYPES:
        both = _random(run, 9, 2 * (100 if run.tiny else 14336), dtype=dtype) * 3
        gate, up = both.chunk(2, dim=1)
        for name in activation_reference.ACTIVATIONS:
            exact = activation_reference.gated_activation(gate.double(), up.double(), name)
            yield gated_activation(gate, up, name), exact, 2.0**-7 if dtype == torch.bfloat16 else 3e-6, 1e-6


def _rotary(run: Run) -> Iterable[Case]:
    num_rows, num_heads, dim = (3, 2, 20) if run.tiny else (64, 40, 128)
    for dtype in DTYPES:
        heads = _random(run, num_rows, num_heads, dim, dtype=dtype)
        angles = _random(run, num_rows, dim)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        exact = rotary_reference.rotate(heads.double(), cos.double(), sin.double())
        rotate_(heads, cos, sin)
        # Both products are rounded, and their sum may cancel: of size up to 4, each.
        yield heads, exact, 2.0**-8 if dtype == torch.bfloat16 else 1e-6, 2.0**-6 if dtype == torch.bfloat16 else 1e-6


PARTS = [
    _part("linear", _linear),
    *correctness_codes.PARTS,
    _part("paged_attention", _attention),
    _part("paged_attention, latents", _latents),
    _part("rms_norm", _norm),
    _part("gated_activation", _activation),
    _part("rotary", _rotary),
    Part("correctness", "kv_write, kv_move", 5.0, _copies),
    *correctness_recurrent.PARTS,
    *correctness_sampling.PARTS,
]
