"""The row-invariant linear against cuBLAS and the floor: every weight of a Llama-8B at 1, 8 and 64 rows.

The floor is the bytes of weight, inputs and outputs at the measured bandwidth of a copy.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.gpu_report.report import Finding, Part, Run, judged, noted
from benchmarks.gpu_report.timing import copy_bandwidth, graph_us, num_copies
from outrider.kernels.linear.triton import linear

MOST_TIMES_CUBLAS = 1.1
WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
ROW_COUNTS = (1, 8, 64)
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


PARTS = [Part("linear", "linear", 30.0, _measure)]
