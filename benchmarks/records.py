"""Writes a benchmark's rows, each with the machine it was measured on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("outrider", "torch", "transformers", "grpcio", "numba", "redis")


def quantiles(values: list[float]) -> dict[str, float]:
    """p20, p50, p80 and p99 by nearest rank; empty for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    return {
        f"p{percent}": ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] for percent in (20, 50, 80, 99)
    }


def provenance() -> dict[str, Any]:
    """Machine, commit and versions of a measurement."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
    }


def save_rows(name: str, rows: list[dict[str, Any]]) -> Path:
    """Appends the rows, each with its provenance, to benchmarks/results/NAME.jsonl."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    common = provenance()
    with path.open("a") as out:
        for row in rows:
            out.write(json.dumps({**common, **row}) + "\n")
    return path


def _commit() -> str:
    root = Path(__file__).parent
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    return described.stdout.strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
