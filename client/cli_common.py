"""What the commands of `outrider` share: where they print, how they end, and the options that several take.

Exit codes: 0 done, 1 failed, 2 wrong usage or setting, 130 interrupted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from client.stack import read_state
from client.stack_commands import StackState
from shared.errors import ConfigError, InvalidRequest, OutriderError

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
RunDir = Annotated[Path, typer.Option(help="Folder for logs and state.", envvar="OUTRIDER_RUN_DIR")]
DEFAULT_RUN_DIR = Path(".run")
ApiKey = Annotated[str, typer.Option(envvar="OUTRIDER_API_KEY", help="Of a gateway that asks for keys.")]
Address = Annotated[str, typer.Option(help="Gateway's gRPC address; empty: the running stack's.")]
Url = Annotated[str, typer.Option(help="Gateway's REST address; empty: the running stack's.")]
TlsCaFile = Annotated[str, typer.Option(help="TLS, with the gateway checked against this authority.")]
TlsCertFile = Annotated[str, typer.Option(help="Certificate to present, with --tls-key-file.")]
TlsKeyFile = Annotated[str, typer.Option(help="Its private key.")]
Method = Annotated[str, typer.Option(help="auto, off or a draft method of the server: draft_model, ngram, ...")]
NumSpeculativeTokens = Annotated[int, typer.Option(min=0, help="Draft tokens per round; 0: the server's default.")]


class clear_errors:
    """Turns our own errors into one line and an exit code."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            raise typer.Exit(130) from None
        if isinstance(error, OutriderError):
            errors.print(f"outrider: {error.message}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(2 if isinstance(error, ConfigError | InvalidRequest) else 1) from None


def say(message: str) -> None:
    console.print(f"[dim]==> {message}[/dim]")


def say_aside(message: str) -> None:
    """`say` where standard output belongs to the result."""
    errors.print(f"[dim]==> {message}[/dim]")


def print_json(value: dict[str, Any]) -> None:
    console.print_json(json.dumps(value))


def running_stack(run_dir: Path, option: str) -> StackState:
    """The stack that was started from here. Raises ConfigError that names the option to give instead."""
    state = read_state(run_dir)
    if state is None:
        raise ConfigError(f"no stack is running here; start one with `outrider up` or give {option}")
    return state
