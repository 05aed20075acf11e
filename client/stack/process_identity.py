"""Tells a process from a later one that has got its pid."""

from __future__ import annotations

import subprocess
from pathlib import Path

_PROC = Path("/proc")
# Words after the parenthesised name in /proc/PID/stat (man 5 proc): the state, and the start in clock ticks after boot.
_STATE, _START = 0, 19


def process_identity(pid: int) -> str:
    """Boot and start time of the process; empty when there is none, or only its exit code is left. Not its command
    line, which Redis replaces.
    """
    return _from_proc(pid) if (_PROC / "self").exists() else _from_ps(pid)


def _from_proc(pid: int) -> str:
    try:
        words = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return "" if words[_STATE] in "ZX" else f"{boot} {words[_START]}"


def _from_ps(pid: int) -> str:
    """Returns the identity by ps, where there is no /proc, as on macOS."""
    done = subprocess.run(
        ["ps", "-ww", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    state, _, rest = done.stdout.strip().partition(" ")
    return "" if state.startswith("Z") else rest.strip()
