"""`outrider status`: what runs here, and the fleet behind any gateway, once or live."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any

import httpx
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from client.cli_common import (
    DEFAULT_RUN_DIR,
    ApiKey,
    Json,
    RunDir,
    TlsCaFile,
    TlsCertFile,
    TlsKeyFile,
    Url,
    clear_errors,
    console,
    print_json,
)
from client.cli_stack import show_running
from client.fleet import Counts, Rates, rates, read_counts, read_fleet
from client.rest import rest_client
from client.stack import read_state
from client.stack_commands import StackState
from shared.errors import ConfigError, OutriderError
from shared.tls import client_tls

Interval = Annotated[float, typer.Option(min=0.1, help="Seconds between two looks, with --live.")]


def status(
    url: Url = "",
    live: Annotated[bool, typer.Option("--live", help="Look again and again, until Ctrl-C.")] = False,
    interval: Interval = 1.0,
    api_key: ApiKey = "",
    tls_ca_file: TlsCaFile = "",
    tls_cert_file: TlsCertFile = "",
    tls_key_file: TlsKeyFile = "",
    run_dir: RunDir = DEFAULT_RUN_DIR,
    as_json: Json = False,
) -> None:
    """Show what runs and the fleet; exit code 1 when nothing runs or the gateway does not answer.

    With --live --json: one line of JSON per look.

    Examples:

      outrider status --live

      outrider status --url https://llm.example --api-key "$KEY" --json
    """
    with clear_errors():
        tls = client_tls(tls_cert_file, tls_key_file, tls_ca_file, setting="tls")
        state = None if url else read_state(run_dir)
        if not url and state is None:
            console.print("{}" if as_json else "no stack is running")
            raise typer.Exit(1)
        with rest_client(url or _url(state), api_key, tls) as client:
            if live:
                _follow(client, interval, as_json=as_json)
            else:
                _show_once(client, state, as_json=as_json)


def _url(state: StackState | None) -> str:
    if state is None:
        raise ConfigError("no stack is running here; start one with `outrider up` or give --url")
    return state.url


def _show_once(client: httpx.Client, state: StackState | None, *, as_json: bool) -> None:
    if state is not None and not as_json:
        show_running(state)  # whatever the gateway says
    fleet = read_fleet(client)
    if as_json:
        print_json({**(asdict(state) if state else {"url": str(client.base_url)}), "fleet": fleet})
    else:
        console.print(fleet_view(fleet, None))


def _follow(client: httpx.Client, interval_s: float, *, as_json: bool) -> None:
    """Until Ctrl-C, which is exit code 130. A gateway that is away for a moment shows as such."""
    fleet, last = read_fleet(client), _counts(client)
    display = nullcontext() if as_json else Live(fleet_view(fleet, None), console=console, auto_refresh=False)
    with display as screen:
        while True:
            time.sleep(interval_s)
            try:
                fleet, now = read_fleet(client), _counts(client)
            except OutriderError as error:
                if screen is None:
                    raise
                screen.update(Group(fleet_view(fleet, None), error.message), refresh=True)
                continue
            speed = rates(last, now) if last and now else None
            last = now
            if screen is None:
                print(json.dumps({**fleet, "rates": asdict(speed) if speed else None}), flush=True)
            else:
                screen.update(fleet_view(fleet, speed), refresh=True)


def _counts(client: httpx.Client) -> Counts | None:
    """None where the metrics are kept from us: the fleet can be shown without."""
    try:
        return read_counts(client)
    except OutriderError:
        return None


def fleet_view(fleet: dict[str, Any], speed: Rates | None) -> RenderableType:
    """Two tables and a line; 80 columns are enough for both."""
    verifiers = _table("verifier", "", "model", "on", right=("sessions", "waiting", "KV used"))
    for member in fleet["verifiers"]:
        verifiers.add_row(
            member["address"],
            _health(member),
            member["model"],
            f"{member['device']} {member['dtype']}",
            _sessions(member),
            str(member["num_waiting"]),
            _used_blocks(member),
        )
    drafters = _table("drafter", "", "methods", right=("sessions",))
    drafting_verifiers = [member for member in fleet["verifiers"] if member.get("methods")]
    for member in (*drafting_verifiers, *fleet["drafters"]):
        methods = ", ".join(_method(method) for method in member["methods"])
        drafters.add_row(member["address"], _health(member), methods, _sessions(member))
    return Group("", verifiers, "", drafters, "", _gateway_line(fleet, speed))


def _table(*left: str, right: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _method(method: dict[str, str]) -> str:
    return f"{method['name']} ({method['model']})" if method["model"] else method["name"]


def _sessions(member: dict[str, Any]) -> str:
    return f"{member['num_sessions']}/{member['max_sessions']}"


def _health(member: dict[str, Any]) -> str:
    return "[green]up[/green]" if member["healthy"] else "[red]DOWN[/red]"


def _used_blocks(member: dict[str, Any]) -> str:
    num_blocks = member["num_blocks"]
    used = num_blocks - member["num_free_blocks"]
    return f"{used / num_blocks:.0%} of {num_blocks}" if num_blocks else ""


def _gateway_line(fleet: dict[str, Any], speed: Rates | None) -> str:
    parts = [f"gateway {fleet['version']}, {fleet['gateway']['num_running']} running"]
    if speed is not None:
        parts.append(f"{speed.tokens_per_s:.1f} tokens/s")
        parts.append(f"{speed.requests_per_s:.1f} requests/s")
        if speed.failures_per_s:
            parts.append(f"[red]{speed.failures_per_s:.1f} failures/s[/red]")
        if speed.acceptance_rate is not None:
            parts.append(f"{speed.acceptance_rate:.0%} of the draft tokens accepted")
    return ", ".join(parts)
