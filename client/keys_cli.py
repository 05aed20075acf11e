"""`outrider key`: makes API keys for the gateway's --api-keys-file. It writes no file and asks no server."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from client.cli_common import Json
from shared.api_keys import key_line, new_key
from shared.errors import ConfigError

keys_app = typer.Typer(help="API keys for the gateway.", no_args_is_help=True)


@keys_app.callback()
def _group() -> None:
    """Make API keys for the gateway's --api-keys-file."""


@keys_app.command()
def new(
    name: Annotated[str, typer.Argument(help="Whose key it is; shown in no answer, kept with the requests.")],
    max_concurrent: Annotated[int, typer.Option(min=0, help="Requests at a time; 0: no limit.")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(min=0, help="Prompt and output together; 0: no limit.")] = 0,
    as_json: Json = False,
) -> None:
    """Print a new key, once, and the line for the file: standard output holds the line, standard error the key.

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
    print(f"key, shown only now: {key}", file=sys.stderr)
    print(line)
