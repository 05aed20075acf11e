"""Code that the `outrider` commands share: consoles, exit codes, and common options.

Exit codes: 0 done, 1 failed, 2 wrong usage or setting, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider.client.fleet import read_fleet
from outrider.client.rest import rest_client
from outrider.client.stack.commands import StackState
from outrider.client.stack.processes import read_state
from outrider.shared.command_line import CTRL_C
from outrider.shared.errors import ConfigError, InvalidRequest, OutriderError, Unavailable
from outrider.shared.tls import TlsConfig

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
RunDir = Annotated[Path, typer.Option(help="Folder for logs and state.", envvar="OUTRIDER_RUN_DIR")]
DEFAULT_RUN_DIR = Path(".run")
# The variable of the `openai` command and of OpenAI's clients.
BASE_URL_VARIABLE = "OPENAI_BASE_URL"
ApiKey = Annotated[str, typer.Option(envvar="OUTRIDER_API_KEY", help="API key, if the gateway requires one.")]
Address = Annotated[
    str, typer.Option(help="Gateway's gRPC address; empty: that of $OPENAI_BASE_URL, else the running stack's.")
]
_HOST_PORT = re.compile(r"[\w.-]+:\d{1,5}|\[[\da-fA-F:.]+\]:\d{1,5}|unix:.+")
# Part of gRPC's message -> what it means.
_ADDRESS_PROBLEMS = {
    "Connection refused": "nothing listens there; a gateway's gRPC port is its HTTP port plus 1, or its --grpc-port",
    "lookup failed": "the host is not known",
    "parsing HTTP/2": "an HTTP server, not a gRPC server, listens there; give it as --url http://...",
    "http1.x server": "an HTTP server, not a gRPC server, listens there; give it as --url http://...",
    "timed out": "nothing answers there",
}
Url = Annotated[str, typer.Option(help="Gateway's REST address; empty: $OPENAI_BASE_URL, else the running stack's.")]
TlsCaFile = Annotated[str, typer.Option(help="Use TLS and verify the gateway against this CA certificate.")]
TlsCertFile = Annotated[str, typer.Option(help="Client certificate, with --tls-key-file.")]
TlsKeyFile = Annotated[str, typer.Option(help="Private key of the client certificate.")]
Method = Annotated[str, typer.Option(help="auto, off or one of the server's draft methods: draft_model, ngram, ...")]
Prediction = Annotated[
    Path | None,
    typer.Option(help="File with what the output will be, as far as it is known; drafts are taken from it."),
]
NumSpeculativeTokens = Annotated[int, typer.Option(min=0, help="Draft tokens per round; 0: the server's default.")]


class clear_errors:
    """Turns our errors into one line and an exit code."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CTRL_C):
            raise typer.Exit(130) from None
        if isinstance(error, OutriderError):
            errors.print(f"outrider: {error.message}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(2 if isinstance(error, ConfigError | InvalidRequest) else 1) from None


def say(message: str) -> None:
    console.print(f"[dim]==> {message}[/dim]", soft_wrap=True)


def say_aside(message: str) -> None:
    """Prints as `say` does, on standard error: standard output is for the result."""
    errors.print(f"[dim]==> {message}[/dim]", soft_wrap=True)


def print_json(value: dict[str, Any]) -> None:
    console.print_json(json.dumps(value))


def path_for_services(path: str) -> str:
    """Returns a path that exists here as an absolute one, as services run in other folders; any other as it is."""
    return str(Path(path).resolve()) if Path(path).exists() else path


def grpc_target(address: str, url: str, api_key: str, tls: TlsConfig | None, run_dir: Path) -> tuple[str, str]:
    """Returns the gRPC address and the API key.

    The address is `address`, else that of the gateway at `url` or $OPENAI_BASE_URL, which reports its port, else that
    of the stack started from run_dir. Raises OutriderError that names the option.
    """
    if address and url:
        raise ConfigError(f"--url {url} and --address {address} are both given; give one of them")
    for part in filter(None, (part.strip() for part in address.split(","))):
        if _HOST_PORT.fullmatch(part) is None:
            advice = f"give --url {part}" if "://" in part else "--url takes the address of the gateway's page"
            raise ConfigError(f"--address: {part} is not host:port of a gateway's gRPC server; {advice}")
    option = "--url" if url else BASE_URL_VARIABLE
    if not (address or url) and (url := os.environ.get(BASE_URL_VARIABLE, "")):
        api_key = openai_api_key(api_key)
    if not url:
        return address or running_stack(run_dir, f"--url, --address or {BASE_URL_VARIABLE}").grpc_address, api_key
    with rest_client(url, api_key, tls) as client:
        # A gateway of an earlier version does not say.
        port = read_fleet(client)["gateway"].get("grpc_port", -1)
        host = client.base_url.netloc.decode().rpartition("@")[2].removesuffix(f":{client.base_url.port}")
    if port < 0:
        raise ConfigError(f"{option}: {url} tells no gRPC port, which this command needs; give --address")
    return f"{host}:{port}", api_key


@contextmanager
def clear_address(address: str) -> Iterator[None]:
    """Reports a wrong gRPC address in one line, as gRPC's own messages are long."""
    try:
        yield
    except Unavailable as error:
        problem = next((said for part, said in _ADDRESS_PROBLEMS.items() if part in error.message), None)
        if problem is None:
            raise
        raise Unavailable(f"{address}: {problem}") from None


def predicted_text(prediction: Path | None) -> str:
    """Returns the file's text; "" without a file. Raises ConfigError for a file that is not readable text."""
    if prediction is None:
        return ""
    try:
        return prediction.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--prediction: {prediction}: {error.strerror}", param="prediction") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--prediction: {prediction} is not UTF-8 text", param="prediction") from None


def openai_api_key(api_key: str) -> str:
    """Returns the API key for the server at $OPENAI_BASE_URL only: one server's key is not sent to another."""
    return api_key or os.environ.get("OPENAI_API_KEY", "")


def running_stack(run_dir: Path, option: str) -> StackState:
    """The stack started from this folder. Raises ConfigError that names the option to give instead."""
    state = read_state(run_dir)
    if state is None:
        raise ConfigError(f"no stack is running here; start one with `outrider up` or give {option}")
    return state
