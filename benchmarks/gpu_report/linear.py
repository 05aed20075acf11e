"""The row-invariant linear beside cuBLAS and the floor: every weight of a Llama-8B at 1, 8 and 64 rows.

On packed codes: two of the weights, beside the floor and our linear on bfloat16 weights.

The floor is the bytes of weight, inputs and outputs at the measured bandwidth of a copy.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_report.correctness_codes import codes_of
from benchmarks.gpu_report.report import Finding, Part, Run, judged, noted
from benchmarks.gpu_report.timing import copy_bandwidth, graph_us, num_copies
from outrider.kernels.linear import triton_code_blocks, triton_codes
from outrider.kernels.linear.triton import linear

MOST_TIMES_CUBLAS = 1.1
WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
ROW_COUNTS = (1, 8, 64)
CODED_WEIGHTS = ((4096, 4096), (28672, 4096))
# kind, group of inputs, has minimums
CODES = (("i4", 128, False), ("i4", 32, True), ("table", 16, False), ("i8", 32, False), ("e4m3", 128, False))
Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _measure(run: Run) -> Iterable[Finding]:
    yield noted("copy of 1 GiB", f"{copy_bandwidth() / 1e12:.2f} TB/s read and written", bandwidth=copy_bandwidth())
    rows: list[dict[str, Any]] = []
    for shape in WEIGHTS:
        num_bytes = 2 * shape[0] * shape[1]
        weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(num_copies(num_bytes))]
        for num_rows in ROW_COUNTS:
            rows.append(_compare(weights, num_rows, 10 if run.quick else 20))
    ratios = [row["to_cublas"] for row in rows]
    worst = max(rows, key=lambda row: float(row["to_cublas"]))
    shown = "x".join(map(str, worst["weight"]))
    measured = f"{max(ratios):.2f} x at worst ({shown}, {worst['rows']} rows), {statistics.median(ratios):.2f} x median"
    target = f"<= {MOST_TIMES_CUBLAS} x cuBLAS, 1-64 rows"
    yield judged("15 weights and row counts", target, measured, max(ratios) <= MOST_TIMES_CUBLAS, cases=rows)


def _compare(weights: list[torch.Tensor], num_rows: int, replays: int) -> dict[str, Any]:
    num_outputs, num_inputs = weights[0].shape
    x = torch.randn(num_rows, num_inputs, device="cuda", dtype=torch.bfloat16)

    def median_us(function: Linear) -> float:
        return graph_us([lambda weight=weight: function(x, weight) for weight in weights], replays)  # type: ignore[misc]

    ours, cublas = median_us(linear), median_us(torch.nn.functional.linear)
    num_bytes = 2 * (num_outputs * num_inputs + num_rows * (num_inputs + num_outputs))
    floor = num_bytes / copy_bandwidth() * 1e6
    return {
        "weight": [num_outputs, num_inputs],
        "rows": num_rows,
        "us": ours,
        "cublas_us": cublas,
        "floor_us": floor,
        "to_cublas": ours / cublas,
        "to_floor": ours / floor,
    }


def _measure_codes(run: Run) -> Iterable[Finding]:
    """No target: nobody has measured them yet."""
    replays = 10 if run.quick else 20
    for kind, group, has_minimums in CODES:
        rows = [
            row
            for shape in CODED_WEIGHTS
            for row in _compare_codes(kind, group, shape, replays, has_minimums=has_minimums)
        ]
        shown = ", ".join(f"{row['to_bf16']:.2f} x bf16 and {row['to_floor']:.1f} x floor" for row in rows[:3])
        name = f"{kind} in groups of {group}{' with minimums' if has_minimums else ''}"
        yield noted(name, f"{shown} at {', '.join(map(str, ROW_COUNTS))} rows of {rows[0]['weight']}", cases=rows)


def _compare_codes(
    kind: str, group: int, shape: tuple[int, int], replays: int, *, has_minimums: bool
) -> Iterable[dict[str, Any]]:
    num_outputs, num_inputs = shape
    packed = triton_code_blocks.pack([codes_of(kind, *shape, group, has_minimums=has_minimums)], "cuda")
    copies = [copy.deepcopy(packed) for _ in range(num_copies(packed.nbytes))]
    plain = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    weights = [plain.clone() for _ in range(num_copies(plain.nbytes))]
    for num_rows in ROW_COUNTS:
        x = torch.randn(num_rows, num_inputs, device="cuda", dtype=torch.bfloat16)
        ours = graph_us([partial(triton_codes.linear, x, weight) for weight in copies], replays)
        bf16 = graph_us([partial(linear, x, weight) for weight in weights], replays)
        floor = (packed.nbytes + 2 * num_rows * (num_inputs + num_outputs)) / copy_bandwidth() * 1e6
        figures = {"us": ours, "bf16_us": bf16, "floor_us": floor, "to_bf16": ours / bf16, "to_floor": ours / floor}
        yield {"weight": [num_outputs, num_inputs], "rows": num_rows, **figures}


PARTS = [Part("linear", "linear", 30.0, _measure), Part("linear", "packed codes", 30.0, _measure_codes)]
