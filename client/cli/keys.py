"""`outrider key`: makes API keys for the gateway's --api-keys-file. It writes no file and contacts no server."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from outrider.client.cli.common import Json
from outrider.shared.api_keys import key_line, new_key
from outrider.shared.errors import ConfigError

keys_app = typer.Typer(help="API keys for the gateway.", no_args_is_help=True)


@keys_app.callback()
def _group() -> None:
    """Make API keys for the gateway's --api-keys-file."""


@keys_app.command()
def new(
    name: Annotated[str, typer.Argument(help="The key's owner; stored with requests, never shown in answers.")],
    max_concurrent: Annotated[int, typer.Option(min=0, help="Concurrent requests; 0: unlimited.")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(min=0, help="Prompt plus output tokens; 0: unlimited.")] = 0,
    as_json: Json = False,
) -> None:
    """Print a new key once (standard error) and its line for the file (standard output).

    Example: outrider key new alice --tokens-per-minute 100000 >> api-keys && kill -HUP GATEWAY_PID
    """
    key = new_key()
    try:
        line = key_line(name, key, max_concurrent, tokens_per_minute)
    except ConfigError as error:
        print(f"outrider: {error.message}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps({"name": name, "key": key, "line": line}))
        return
    print(f"key, shown only once: {key}", file=sys.stderr)
    print(line)
