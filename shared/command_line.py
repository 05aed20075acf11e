"""Ends wrong command lines: one line that names the option and where to look, exit code 2.

Not here: the commands, and the services' own options (config.py).
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import typer

# click's, or typer's own copy of it, by version
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
# What Ctrl-C raises in a command. asyncio.Runner installs its handler before it resets its count of interrupts (CPython
# 3.11, Runner.run): an interrupt between the two cancels the task, and the runner takes it for somebody else's doing.
CTRL_C = (KeyboardInterrupt, asyncio.CancelledError)


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
