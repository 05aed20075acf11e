"""`outrider status`: the stack running here, and the fleet behind any gateway, once or live."""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any

import httpx
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outrider.client.cli.common import (
    BASE_URL_VARIABLE,
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
    openai_api_key,
    print_json,
)
from outrider.client.cli.stack import show_running
from outrider.client.fleet import Counts, Rates, rates, read_counts, read_fleet
from outrider.client.rest import rest_client
from outrider.client.stack.commands import StackState
from outrider.client.stack.processes import dead_processes, read_state
from outrider.shared.errors import ConfigError, OutriderError
from outrider.shared.tls import client_tls

Interval = Annotated[float, typer.Option(min=0.1, help="Seconds between updates, with --live.")]


def status(
    url: Url = "",
    live: Annotated[bool, typer.Option("--live", help="Keep updating until Ctrl-C.")] = False,
    interval: Interval = 1.0,
    api_key: ApiKey = "",
    tls_ca_file: TlsCaFile = "",
    tls_cert_file: TlsCertFile = "",
    tls_key_file: TlsKeyFile = "",
    run_dir: RunDir = DEFAULT_RUN_DIR,
    as_json: Json = False,
) -> None:
    """Show what runs and the fleet. Exit code 1 when nothing runs, a part is down or the gateway does not answer.

    With --live --json: one line of JSON per update.

    Examples:

      outrider status --live

      outrider status --url https://llm.example --api-key "$KEY" --json
    """
    with clear_errors():
        tls = client_tls(tls_cert_file, tls_key_file, tls_ca_file, setting="tls")
        if not url and (url := os.environ.get(BASE_URL_VARIABLE, "")):
            api_key = openai_api_key(api_key)
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
    """Shows the stack and the fleet once. Raises typer.Exit(1) when a process or a member of the fleet is down."""
    dead = dead_processes(state) if state is not None else []
    if state is not None and not as_json:
        show_running(state)  # even if the gateway does not answer
        if dead:
            console.print(f"[red]DOWN[/red]   {', '.join(dead)}", soft_wrap=True)
    fleet = read_fleet(client)
    if as_json:
        print_json({**(asdict(state) if state else {"url": str(client.base_url)}), "down": dead, "fleet": fleet})
    else:
        console.print(fleet_view(fleet, None))
    if dead or not all(member["healthy"] for member in (*fleet["verifiers"], *fleet["drafters"])):
        raise typer.Exit(1)


def _follow(client: httpx.Client, interval_s: float, *, as_json: bool) -> None:
    """Shows the fleet until Ctrl-C, which is exit code 130. An unreachable gateway is shown as such and tried again."""
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
    """Returns the fleet's counts; None if the metrics need another API key: the fleet is shown without them."""
    try:
        return read_counts(client)
    except OutriderError:
        return None


def fleet_view(fleet: dict[str, Any], speed: Rates | None) -> RenderableType:
    """Returns two tables, a line and the warning, at most 80 columns wide."""
    verifiers = _table("verifier", "", "model", "on", right=("sessions", "waiting", "KV used"))
    for member in fleet["verifiers"]:
        verifiers.add_row(
            member["address"],
            _health(member),
            _target(member),
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
    heads = [
        _heads_line(member["address"], method)
        for member in (*drafting_verifiers, *fleet["drafters"])
        for method in member["methods"]
        if method.get("heads")
    ]
    learners = [_learner_line(member) for member in fleet["verifiers"] if member.get("learning")]
    # A gateway of an earlier version says nothing of it.
    warning = fleet.get("warning", "")
    warnings = [Text(f"warning: {warning}", style="yellow")] if warning else []
    return Group("", verifiers, "", drafters, "", *heads, *learners, _gateway_line(fleet, speed), *warnings)


def _table(*left: str, right: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _target(member: dict[str, Any]) -> str:
    version = member.get("target_version", 0)  # of gateways of an earlier version: not said
    return f"{member['model']}, version {version}" if version > 1 else str(member["model"])


def _method(method: dict[str, Any]) -> str:
    version = method.get("version", 0)  # of gateways of an earlier version: not said
    swapped = f", version {version}" if version > 1 else ""
    return f"{method['name']} ({method['model']}{swapped})" if method["model"] else str(method["name"])


def _heads_line(address: str, method: dict[str, Any]) -> Text:
    parts = []
    for head in method["heads"]:
        num_drafts = head["num_drafts"]
        brought = f", {1 + head['num_accepted_tokens'] / num_drafts:.2f} tokens a round" if num_drafts else ""
        parts.append(f"{head['name']} {head['num_sessions']} ended sessions{brought}")
    return Text(f"{address}: heads of {method['name']}: {'; '.join(parts)}")


def _sessions(member: dict[str, Any]) -> str:
    return f"{member['num_sessions']}/{member['max_sessions']}"


def _health(member: dict[str, Any]) -> str:
    if not member["healthy"]:
        return "[red]DOWN[/red]"
    return "[yellow]draining[/yellow]" if member.get("next_numerics") else "[green]up[/green]"


def _used_blocks(member: dict[str, Any]) -> str:
    num_blocks = member["num_blocks"]
    used = num_blocks - member["num_free_blocks"]
    return f"{used / num_blocks:.0%} of {num_blocks}" if num_blocks else ""


def _learner_line(member: dict[str, Any]) -> str:
    learning = member["learning"]
    parts = [f"{member['address']} has learned from {learning['num_tokens']:,} tokens"]
    parts += [f"{learning['num_dropped_tokens']:,} dropped"] if learning["num_dropped_tokens"] else []
    heads = "{num_taken} heads taken, {num_refused} refused, {num_rolled_back} rolled back".format(**learning)
    parts.append(heads)
    if learning.get("num_salts"):
        parts.append(
            "{num_salts} salts learned from apart, {num_salt_heads} with a head of their own".format(**learning)
        )
    if learning["tokens_after"]:
        parts.append("{tokens_before:.2f} -> {tokens_after:.2f} tokens a round expected".format(**learning))
    return ", ".join(parts) + (f" (last refused: {learning['refusal']})" if learning["refusal"] else "")


def _gateway_line(fleet: dict[str, Any], speed: Rates | None) -> str:
    parts = [f"gateway {fleet['version']}, {fleet['gateway']['num_running']} running"]
    if speed is not None:
        parts.append(f"{speed.tokens_per_s:.1f} tokens/s")
        parts.append(f"{speed.requests_per_s:.1f} requests/s")
        if speed.failures_per_s:
            parts.append(f"[red]{speed.failures_per_s:.1f} failures/s[/red]")
        if speed.acceptance_rate is not None:
            parts.append(f"{speed.acceptance_rate:.0%} of the draft tokens accepted")
        if speed.saved_s:
            verb = "saved" if speed.saved_s > 0.0 else "cost"
            parts.append(f"speculation has {verb} about {abs(speed.saved_s):.1f} s since the start")
    return ", ".join(parts)
