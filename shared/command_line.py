"""Parts that all commands share: settings from a command's arguments, and one line with exit code 2 for a wrong line.

Not here: the commands, and the services' own options (config.py).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import typer

T = TypeVar("T")
# click's, or typer's own copy of it, by version
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
# What Ctrl-C raises in a command. asyncio.Runner installs its handler before it resets its count of interrupts (CPython
# 3.11, Runner.run): an interrupt between the two cancels the task, and the runner takes it for somebody else's doing.
CTRL_C = (KeyboardInterrupt, asyncio.CancelledError)


def from_arguments(kind: type[T], arguments: Mapping[str, Any], **changed: Any) -> T:
    """Makes a dataclass of settings from a command's arguments (its `locals()`), each field from that of its name.

    changed: fields that are made of other arguments. A field that is in neither keeps its default.
    """
    made: Any = kind
    names = {entry.name for entry in fields(made)}
    return kind(**{name: value for name, value in arguments.items() if name in names} | changed)


def run_command(app: typer.Typer, prog_name: str) -> None:
    """Runs `app` on this process's arguments and ends the process.

    click's own usage errors are three lines, of which the last says what is wrong.
    """
    try:
        code = app(prog_name=prog_name, standalone_mode=False)
    except typer.Abort:
        sys.exit(1)
    except _USAGE_ERROR as error:
        sys.exit(_told(error, prog_name))
    sys.exit(code if isinstance(code, int) else 0)


def _told(error: Any, prog_name: str) -> int:
    """Prints the error; returns its exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        command = error.ctx.command_path if error.ctx is not None else prog_name
        words = " ".join(error.format_message().split()).rstrip(".")
        print(f"outrider: {words}; `{command} --help` lists what there is", file=sys.stderr)
    return int(error.exit_code)
