"""Ports, disk and memory of this machine."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from client.doctor.check import Check, Level

_MIB = 2**20
_FEW_DISK_MIB = 1024
_TOO_FEW_DISK_MIB = 100
# Resident memory of an idle verifier, drafter and gateway without weights and KV cache, torch 2.13 on CPU.
_PROGRAMS_MIB = 1500


def check_port(host: str, port: int, option: str, in_use_by_us: bool) -> Check:
    name = f"port {port}"
    if in_use_by_us:
        return Check(name, "ok", "the running stack's")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return Check(name, "fail", f"{host}:{port}: {error.strerror}", f"end what listens there, or give {option}")
    return Check(name, "ok", f"free on {host}")


def check_disk(run_dir: Path) -> Check:
    """Where logs and the state of Redis go."""
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
    """Whether weights, KV cache and programs fit into what is free now. On a GPU its own memory counts, not this."""
    available_mib = available_memory_mib()
    if available_mib is None:
        return
    if is_running:
        yield Check("memory", "ok", f"{available_mib} MiB available beside the running stack")
        return
    weights_mib = sum(file.stat().st_size for folder in folders for file in Path(folder).glob("*.safetensors")) // _MIB
    needed_mib = weights_mib + kv_cache_mb + _PROGRAMS_MIB
    found = (
        f"{available_mib} MiB available, about {needed_mib} needed: weights {weights_mib}, "
        f"KV cache {kv_cache_mb}, programs {_PROGRAMS_MIB}"
    )
    if needed_mib <= available_mib:
        yield Check("memory", "ok", found)
    else:
        yield Check("memory", "fail", found, "end other programs, take a smaller model or a smaller --kv-cache-mb")


def available_memory_mib() -> int | None:
    """Of the machine, or of the control group that this process is in if that has less; None where nobody says."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    entries = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available_mib = int(entries["MemAvailable"].split()[0]) // 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdigit():
        available_mib = min(available_mib, (int(limit.read_text()) - int(used.read_text())) // _MIB)
    return available_mib
