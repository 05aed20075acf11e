"""The linear on packed codes: no further from the exact product than its law says, and a row's bits in any company."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from benchmarks.gpu_report.report import Finding, Part, Run, judged
from outrider.kernels.linear import triton_code_blocks, triton_codes
from outrider.kernels.linear.codes import Codes
from tests.kernels.test_code_panels import e4m3, error_bound, integers, make_codes

# groups of inputs; 0: one group
_GROUPS = {"i4": (16, 32, 128, 0), "table": (16, 32), "i8": (32, 128, 0), "e4m3": (32, 128, 0)}
_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12, 0], dtype=torch.int8)
_SHAPE, _WIDE = (1000, 2048), (8200, 256)  # of the second, tiles are multiplied by another kind of instruction
_ROW_COUNTS = (1, 2, 8, 17, 33, 64, 65, 130)


def codes_of(kind: str, num_outputs: int, num_inputs: int, group: int, *, has_minimums: bool) -> Codes:
    """Random ones. kind: "i4", "table" (of 4 bits), "i8" or "e4m3"."""
    if kind == "e4m3":
        numbers = e4m3(num_outputs, num_inputs)
    elif kind == "table":
        numbers = _E2M1[integers(num_outputs, num_inputs, 0, 16).int()]
    else:
        numbers = integers(num_outputs, num_inputs, *((-8, 8) if kind == "i4" else (-128, 128)))
    return make_codes(numbers, group or num_inputs, minimums=has_minimums)


def _cases(run: Run) -> Iterator[Codes]:
    if run.tiny:
        yield codes_of("i4", 40, 96, 32, has_minimums=True)
        yield codes_of("e4m3", 20, 96, 96, has_minimums=False)
        return
    for kind, groups in _GROUPS.items():
        for group in groups:
            yield codes_of(kind, *_SHAPE, group, has_minimums=group == 32)
        yield codes_of(kind, *_WIDE, 32, has_minimums=True)


def _measure(run: Run) -> Iterable[Finding]:
    row_counts = (1, 3) if run.tiny else _ROW_COUNTS
    worst, num_wrong, num_rows = 0.0, 0, 0
    for codes in _cases(run):
        x = torch.randn(max(row_counts), codes.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
        bias = torch.randn(codes.shape[0], generator=torch.Generator().manual_seed(2)).bfloat16()
        packed, on_device = triton_code_blocks.pack([codes], run.device), (x.to(run.device), bias.to(run.device))
        whole = triton_codes.linear(on_device[0], packed, on_device[1])
        error = (whole.cpu().double() - (x.double() @ codes.dequantised().double().T + bias.double())).abs()
        worst = max(worst, float((error / error_bound(x, codes, bias)).nan_to_num(nan=torch.inf).max()))
        for count in row_counts:
            for rows in (slice(0, count), slice(len(x) - count, None)):
                found = triton_codes.linear(on_device[0][rows], packed, on_device[1])
                num_wrong += int((found != whole[rows]).any(1).sum())
                num_rows += count
    yield judged("packed codes", "error <= the law's bound", f"bfloat16 {worst:.2f}", 0 < worst <= 1, bfloat16=worst)
    yield judged(
        "packed codes, rows in any company", "every bit equal", f"{num_wrong} of {num_rows} rows differ", num_wrong == 0
    )


PARTS = [Part("correctness", "packed codes", 15.0, _measure)]
