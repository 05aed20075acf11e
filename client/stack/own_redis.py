"""The Redis that a stack starts for itself: its password, its memory, and how others reach it.

The password is in redis.conf, which the user alone can read: never on a command line, nor in stack.json.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from pathlib import Path

from outrider.client.stack.commands import StackState

# bytes; twice a gateway's --max-log-mb and --max-stored-mb; beyond it Redis refuses writes, or it would take all memory
_MAX_MEMORY = "640mb"


def write_config(data_dir: Path) -> Path:
    """Creates the folder and, in it, redis.conf with a new password; both are the user's alone."""
    data_dir.mkdir(exist_ok=True)
    data_dir.chmod(0o700)
    path = data_dir / "redis.conf"
    path.unlink(missing_ok=True)  # an older one may be readable by others
    lines = (
        f"requirepass {secrets.token_hex(16)}",
        f"maxmemory {_MAX_MEMORY}",
        "maxmemory-policy noeviction",
        # Commits survive a killed Redis; Compose and Kubernetes use `everysec` too.
        'save ""',
        "appendonly yes",
        "appendfsync everysec",
    )
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("\n".join(lines) + "\n")
    return path


def password_of(config: Path) -> str:
    """Returns the password that write_config wrote; empty for a config without one, or an unreadable config."""
    with contextlib.suppress(OSError):
        for line in config.read_text().splitlines():
            if line.startswith("requirepass "):
                return line.split()[1]
    return ""


def redis_url_of(state: StackState) -> str:
    """The stack's Redis, with its password where the stack has started it."""
    password = password_of(Path(state.redis_config)) if state.redis_config else ""
    return state.redis_url.replace("redis://", f"redis://:{password}@", 1) if password else state.redis_url


def redis_answers(port: int, password: str = "") -> bool:
    """Returns whether a Redis at 127.0.0.1 serves commands; while it loads its data it accepts connections only."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
        connection.sendall((f"AUTH {password}\r\n" if password else "").encode() + b"PING\r\n")
        with connection.makefile("rb") as replies:
            if password:
                replies.readline()
            return replies.readline().startswith(b"+PONG")
    return False
