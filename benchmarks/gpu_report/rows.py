"""One JSON row per finding, each with the device and the versions that it was measured with.

Not benchmarks.records' own rows: a machine that was lent for a GPU has neither all of our packages nor a checkout.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_report.report import Line

_PACKAGES = ("torch", "triton", "transformers", "numpy")


def provenance(device: torch.device, commit: str) -> dict[str, Any]:
    """`commit` "": asked of git."""
    described: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or _commit(),
        "device": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {
            "device": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "num_multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return described


def save_rows(path: Path, lines: Sequence[Line], common: dict[str, Any]) -> None:
    """Appends a row per finding."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        for line in lines:
            finding = line.finding
            row = {
                **common,
                "section": line.section,
                "name": finding.name,
                "target": finding.target,
                "measured": finding.measured,
                "verdict": finding.verdict,
                "seconds": round(line.seconds, 2),
                **finding.figures,
            }
            out.write(json.dumps(row) + "\n")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return ""
    return described.stdout.strip()
