"""What only programs with torch can say: they run as processes of their own, for the client never loads it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from client.doctor.check import Check, Level

_TIMEOUT_S = 600


class ProgramFailed(Exception):
    """A program gave no JSON; the message is the last line that it wrote."""


def check_engine(drafts: Sequence[str], device: str) -> Iterator[Check]:
    """CPU or GPU, triton, and whether the draft checkpoints are of a known kind."""
    try:
        found = _json_of("drafter_service.probe", *drafts)
    except ProgramFailed as error:
        yield Check("engine", "fail", str(error), "pip install 'outrider[server]'")
        return
    yield _cpu(found)
    yield _gpu(found, device)
    for checkpoint in found["checkpoints"]:
        name = f"draft {checkpoint['path']}"
        if "kind" in checkpoint:
            yield Check(name, "ok", f"recognised as {checkpoint['kind']}")
        else:
            yield Check(name, "fail", checkpoint["problem"], "give another --draft-model")


def check_certificate(model: str, device: str, dtype: str) -> Check:
    """Loads the target and proves that a row's bits are its own."""
    name = "exact mode"
    try:
        certificate = _json_of("engine.certify", model, "--device", device, "--dtype", dtype, "--json")
    except ProgramFailed as error:
        return Check(name, "fail", str(error), "give another --model; docs/models.md says what is served")
    if certificate["holds"]:
        num_checks = len(certificate["checks"])
        return Check(
            name, "ok", f"row invariance holds to the bit ({num_checks} checks, {certificate['seconds']:.1f} s)"
        )
    found = f"rows are not invariant, {certificate['failing_operation']} differs first"
    return Check(name, "fail", found, "try --dtype float32; else ask for rejection mode, exact mode is refused here")


def _cpu(found: dict[str, Any]) -> Check:
    name, cores = "cpu", f"{found['num_cores']} cores, {found['cpu_capability']}"
    if found["has_avx512_bf16"]:
        return Check(name, "ok", f"{cores} with AVX512-BF16: the fastest kernels")
    if found["has_onednn_bfloat16"]:
        return Check(name, "ok", f"{cores} without AVX512-BF16: oneDNN's kernels")
    advice = "--dtype float32 is likely faster here"
    return Check(name, "warn", f"{cores}: oneDNN has no bfloat16 on this CPU", advice)


def _gpu(found: dict[str, Any], device: str) -> Check:
    triton = found["triton"].get("version")
    level: Level = "warn"
    if found["gpus"]:
        cause = ", ".join(f"{gpu['name']} ({gpu['capability']}, {gpu['memory_mib']} MiB)" for gpu in found["gpus"])
        if triton:
            return Check("gpu", "ok", f"{cause}, triton {triton}")
        cause += f", but no triton: {found['triton']['problem']}"
    elif not found["has_nvidia_driver"]:
        level, cause = "ok", "none: no NVIDIA driver on this machine"
    elif found["cuda_of_torch"] is None:
        cause = f"a driver, but torch {found['torch']} is a build without CUDA"
    else:
        cause = f"a driver and torch for CUDA {found['cuda_of_torch']}, but torch sees no GPU"
    if device == "cuda":
        level = "fail"
    advice = "" if level == "ok" else "install a CUDA build of torch and 'outrider[gpu]'; nvidia-smi shows the driver"
    return Check("gpu", level, cause, advice)


def _json_of(module: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ProgramFailed(f"python -m {module} did not end within {_TIMEOUT_S} s") from None
    try:
        value = json.loads(done.stdout)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value
    said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    raise ProgramFailed(said[-1] if said else f"python -m {module} ended with exit code {done.returncode}")
