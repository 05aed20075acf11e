"""Prints torch's view of this machine and the kind of each draft checkpoint as JSON, for `outrider doctor`.

    python -m outrider.drafting.probe models/demo-draft models/demo-eagle3

Not here: judging the results (client/doctor, which never loads torch), and exact mode (engine.certify).
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding

from outrider.drafting.checkpoints.recognise import recognise
from outrider.shared.errors import OutriderError


def probe(folders: list[str]) -> dict[str, Any]:
    features = binding.get_host_cpu_features()
    return {
        "torch": torch.__version__,
        "num_cores": len(os.sched_getaffinity(0)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        # One of them is needed for fast linear layers of a bfloat16 model (same checks as kernels/linear).
        "has_avx512_bf16": bool(features.get("avx512bf16", False)),
        "has_avx2_alone": all(features.get(name, False) for name in ("avx2", "fma", "f16c"))
        and not features.get("avx512bw", False),
        "has_onednn_bfloat16": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        "gpus": _gpus(),
        "has_nvidia_driver": Path("/proc/driver/nvidia/version").is_file(),
        "cuda_of_torch": torch.version.cuda,
        "triton": _triton(),
        "checkpoints": [_checkpoint(folder) for folder in folders],
    }


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "memory_mib": gpu.total_memory // 2**20}
        for gpu in found
    ]


def _triton() -> dict[str, str]:
    """`version`, or `problem`."""
    try:
        return {"version": str(import_module("triton").__version__)}
    except Exception as error:  # a broken build may raise anything
        return {"problem": f"{type(error).__name__}: {error}"}


def _checkpoint(folder: str) -> dict[str, str]:
    """`kind`, or `problem`."""
    try:
        return {"path": folder, "kind": recognise(folder)}
    except OutriderError as error:
        return {"path": folder, "problem": error.message}


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1:])))
