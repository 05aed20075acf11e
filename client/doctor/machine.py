"""Ports, disk and memory of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from outrider.client.doctor.check import Check, Level
from outrider.client.doctor.checkpoints import weights_of
from outrider.shared.errors import ConfigError
from outrider.shared.listening import held_port
from outrider.shared.machine.memory import available_memory_bytes

_MIB = 2**20
_FEW_DISK_MIB = 1024
_TOO_FEW_DISK_MIB = 100
# MiB; resident memory of idle verifier, drafter and gateway without weights and KV cache; measured with torch 2.13, CPU
_PROGRAMS_MIB = 1500


def check_port(host: str, port: int, option: str, in_use_by_us: bool) -> Check:
    name = f"port {port}"
    if in_use_by_us:
        return Check(name, "ok", "the running stack's")
    try:
        with held_port(host, port, option.removeprefix("--")):
            pass
    except ConfigError as error:
        found, _, advice = error.message.partition("; ")
        # A host that is not here is not of one port.
        return Check("host" if error.param == "host" else name, "fail", found, advice or "correct --host")
    return Check(name, "ok", f"free on {host}")


def check_disk(run_dir: Path) -> Check:
    """Free space for logs and Redis' files."""
    folder = run_dir.resolve()
    while not folder.exists():
        folder = folder.parent
    free_mib = shutil.disk_usage(folder).free // _MIB
    found = f"{free_mib} MiB free in {folder}"
    if free_mib >= _FEW_DISK_MIB:
        return Check("disk", "ok", found)
    level: Level = "warn" if free_mib >= _TOO_FEW_DISK_MIB else "fail"
    return Check("disk", level, found, "make room, or name another folder with --run-dir")


def check_memory(folders: Sequence[str], kv_cache_mb: int, is_running: bool) -> Iterator[Check]:
    """Checks that weights, KV cache and programs fit into the available memory. GPU memory is not checked."""
    available_bytes = available_memory_bytes()
    if available_bytes is None:
        return
    available_mib = available_bytes // _MIB
    if is_running:
        yield Check("memory", "ok", f"{available_mib} MiB available with the stack running")
        return
    weights_mib = sum(_weights_bytes(Path(folder)) for folder in folders) // _MIB
    needed_mib = weights_mib + kv_cache_mb + _PROGRAMS_MIB
    found = (
        f"{available_mib} MiB available, about {needed_mib} needed: weights {weights_mib}, "
        f"KV cache {kv_cache_mb}, programs {_PROGRAMS_MIB}"
    )
    if needed_mib <= available_mib:
        yield Check("memory", "ok", found)
    else:
        yield Check("memory", "fail", found, "stop other programs, use a smaller model or a smaller --kv-cache-mb")


def check_least_memory(folders: Sequence[str], kv_cache_mb: int, dtype: str) -> Iterator[Check]:
    """Fails where weights and KV cache alone cannot fit. Silent where a GPU may hold them."""
    available_bytes = available_memory_bytes()
    has_gpu = Path("/proc/driver/nvidia/version").is_file() and os.environ.get("OUTRIDER_DEVICE") != "cpu"
    if available_bytes is None or has_gpu:
        return
    # Weights of float32 may be kept as bfloat16, in half their bytes.
    share = 2 if dtype == "bfloat16" else 1
    weights_mib = sum(_weights_bytes(Path(folder)) for folder in folders) // share // _MIB
    if weights_mib + kv_cache_mb > available_bytes // _MIB:
        found = (
            f"{available_bytes // _MIB} MiB available, at least {weights_mib + kv_cache_mb} needed: "
            f"weights {weights_mib}, KV cache {kv_cache_mb}"
        )
        yield Check("memory", "fail", found, "stop other programs, use a smaller model or a smaller --kv-cache-mb")


def _weights_bytes(folder: Path) -> int:
    """Returns the bytes of a folder's weights; 0: there are none, which another check reports."""
    try:
        return sum(file.stat().st_size for file in weights_of(folder))
    except (ConfigError, OSError):
        return 0
