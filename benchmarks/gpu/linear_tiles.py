"""The fastest tile of the triton linear for each weight: `python -m benchmarks.gpu.linear_tiles` on an NVIDIA GPU.

For each weight of an 8B Llama and 1, 8 and 64 rows: the median time of every candidate of kernels/linear/triton_tiles,
compared with cuBLAS (F.linear) and the floor (bytes of weight, inputs and outputs at a copy's measured bandwidth).
Calls are replayed from a CUDA graph over copies of the weight too large for the cache. The last column is the share of
outputs that differ from the first candidate's, on cancelling data that exposes another summation order. About a minute.
Needs only torch and triton.
"""

from __future__ import annotations

import argparse
import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear as stock_linear

from benchmarks.gpu.timing import copy_bandwidth, graph_us, num_copies
from outrider.kernels.linear.triton import linear_tiled
from outrider.kernels.linear.triton_tiles import CANDIDATES, Tile, row_block, tile_config

WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
ROW_COUNTS = (1, 8, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jsonl", type=Path, help="append the rows to this file")
    jsonl: Path | None = parser.parse_args().jsonl
    if not torch.cuda.is_available():
        raise SystemExit("this machine has no NVIDIA GPU")
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    rows: list[dict[str, Any]] = []
    for num_outputs, num_inputs in WEIGHTS:
        weights = _weights(num_outputs, num_inputs)
        for num_rows in ROW_COUNTS:
            found = _measure(weights, num_rows, bandwidth)
            _print_table(found)
            rows += found
    if jsonl is not None:
        with jsonl.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def _weights(num_outputs: int, num_inputs: int) -> list[torch.Tensor]:
    """Enough copies that none is in the L2 cache on its turn; both halves of the inputs are equal."""
    half = torch.randn(num_outputs, num_inputs // 2, device="cuda", dtype=torch.bfloat16)
    weight = torch.cat((half, half), dim=1)
    return [weight.clone() for _ in range(num_copies(weight.nbytes))]


def _measure(weights: list[torch.Tensor], num_rows: int, bandwidth: float) -> list[dict[str, Any]]:
    num_outputs, num_inputs = weights[0].shape
    half = torch.randn(num_rows, num_inputs // 2, device="cuda", dtype=torch.bfloat16)
    x = torch.cat((half, -half), dim=1)
    block_rows = row_block(num_rows)
    chosen = tile_config(num_outputs, num_inputs, torch.bfloat16, num_rows)
    first = linear_tiled(x, weights[0], None, CANDIDATES[0], block_rows)
    floor_us = 2e6 * (num_outputs * num_inputs + num_rows * (num_inputs + num_outputs)) / bandwidth
    cublas_us = graph_us([functools.partial(stock_linear, x, weight) for weight in weights])
    rows: list[dict[str, Any]] = [{"side": "floor", "us": floor_us}, {"side": "cuBLAS", "us": cublas_us}]
    for tile in CANDIDATES:
        out = linear_tiled(x, weights[0], None, tile, block_rows)
        row: dict[str, Any] = {
            "side": _name(tile) + (" *" if tile == chosen else ""),
            "us": graph_us([functools.partial(linear_tiled, x, weight, None, tile, block_rows) for weight in weights]),
            "differs": (out != first).float().mean().item(),
            "tile": asdict(tile),
        }
        rows.append(row)
    shape = {"num_outputs": num_outputs, "num_inputs": num_inputs, "num_rows": num_rows}
    for row in rows:
        row |= {**shape, "to_cublas": row["us"] / cublas_us, "to_floor": row["us"] / floor_us}
    return sorted(rows, key=lambda row: float(row["us"]))


def _name(tile: Tile) -> str:
    kind = "wgmma" if tile.uses_wgmma else "mma"
    return f"{kind} {tile.block_outputs}x{tile.block_inputs} warps {tile.num_warps} stages {tile.num_stages}"


def _print_table(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    print(f"\n{first['num_outputs']} x {first['num_inputs']}, {first['num_rows']} rows (*: tile_config's choice)")
    print(f"{'':32} {'us':>8} {'x cuBLAS':>9} {'x floor':>8} {'differs':>8}")
    for row in rows:
        differs = f"{row['differs']:8.1%}" if "differs" in row else ""
        print(f"{row['side']:32} {row['us']:8.2f} {row['to_cublas']:9.3f} {row['to_floor']:8.3f} {differs}")


if __name__ == "__main__":
    main()
