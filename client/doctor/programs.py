"""Checks that need torch or the gateway, which the client never loads: they run in child processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.client.doctor.check import Check, Level
from outrider.client.stack.commands import StackSettings, StackState, gateway_command

_TIMEOUT_S = 600


class ProgramFailed(Exception):
    """A program printed no JSON; the message is its last line."""


def probe(drafts: Sequence[str]) -> dict[str, Any]:
    """Returns torch's view of this machine, and the draft checkpoints' kinds. Raises ProgramFailed."""
    return _json_of("outrider.drafting.probe", *drafts)


def check_engine(found: Mapping[str, Any], device: str) -> Iterator[Check]:
    """CPU or GPU, and triton. found: from `probe`."""
    yield _cpu(found)
    yield _gpu(found, device)


def check_certificate(model: str, device: str, dtype: str) -> Check:
    """Loads the target and proves row invariance: a row's bits do not depend on its batch."""
    name = "exact mode"
    try:
        certificate = _json_of("outrider.engine.certify", model, "--device", device, "--dtype", dtype, "--json")
    except ProgramFailed as error:
        return Check(name, "fail", str(error), "give another --model; docs/models.md lists what is served")
    if certificate["holds"]:
        num_checks = len(certificate["checks"])
        return Check(
            name, "ok", f"row invariance holds bit for bit ({num_checks} checks, {certificate['seconds']:.1f} s)"
        )
    found = f"rows are not invariant; {certificate['failing_operation']} is the first to differ"
    return Check(name, "fail", found, "try --dtype float32, or use rejection mode: exact mode is refused here")


def check_gateway(settings: StackSettings) -> Check:
    """Checks that the gateway accepts its options, its environment and the files that both name."""
    environment = {
        **os.environ,
        "OUTRIDER_REDIS_URL": settings.redis_url or "redis://127.0.0.1",  # the stack's own has no address yet
        "OUTRIDER_LOG_FORMAT": "text",
    }
    command = [*gateway_command(settings, StackState()), "--check-only", "true"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return Check("gateway", "ok", "takes its settings")
    found = done.stderr.partition("ERROR gateway: ")[2] or _last_line(done)
    return Check("gateway", "fail", found.strip(), "correct that setting")


def _cpu(found: Mapping[str, Any]) -> Check:
    name, cores = "cpu", f"{found['num_cores']} cores, {found['cpu_capability']}"
    if found["has_avx512_bf16"]:
        return Check(name, "ok", f"{cores} with AVX512-BF16: the fastest kernels")
    if found["has_avx2_alone"]:
        return Check(name, "ok", f"{cores} without AVX-512: the same kernels with AVX2")
    if found["has_onednn_bfloat16"]:
        return Check(name, "ok", f"{cores} without AVX512-BF16: oneDNN's kernels")
    advice = "--dtype float32 is likely faster here"
    return Check(name, "warn", f"{cores}: no kernels for bfloat16 on this CPU", advice)


def _gpu(found: Mapping[str, Any], device: str) -> Check:
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
    raise ProgramFailed(_last_line(done))


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return said[-1] if said else f"{' '.join(done.args[:3])} ended with exit code {done.returncode}"
