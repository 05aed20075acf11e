"""`python -m tests.chaos --requests 1000`: exit code 1 when a byte differs, a request fails or something is left.

A storm of all kinds of trouble at once; or, with one of the flags, another kind of run.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.chaos import show
from tests.chaos.compose import ComposeStack, ComposeUnavailable
from tests.chaos.faults import run_faults
from tests.chaos.fleet import Fleet
from tests.chaos.load import Load
from tests.chaos.netns_fleet import NetnsFleet
from tests.chaos.network import Network, NetworkUnavailable
from tests.chaos.network_faults import network_faults
from tests.chaos.process_faults import process_faults
from tests.chaos.run import leftovers, run_chaos
from tests.chaos.scaling import SCHEDULE, run_scaling
from tests.chaos.targets import TARGETS, Target

_console = Console(width=140)
Advance = Callable[[int], None]


def main(
    requests: Annotated[int, typer.Option(min=1, help="Requests in the storm, or in each round or phase.")] = 1000,
    at_once: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 12,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 96,
    pause: Annotated[float, typer.Option(help="Seconds between two misfortunes; in the storm their mean.")] = 2.0,
    gateways: Annotated[int, typer.Option(min=2)] = 2,
    drafters: Annotated[int, typer.Option(min=1)] = 3,
    verifiers: Annotated[int, typer.Option(min=2)] = 2,
    only: Annotated[str, typer.Option(help="With --each, --netns, --compose: kinds with this in their name.")] = "",
    seed: Annotated[int, typer.Option(help="Of the storm and of what is asked for.")] = 0,
    target: Annotated[str, typer.Option(help="demo, swapped (heads change), one-pass (DSpark), hybrid.")] = "demo",
    scale: Annotated[bool, typer.Option("--scale", help="Drafters 1, 3, 0, 2 under load, nothing else.")] = False,
    each: Annotated[bool, typer.Option("--each", help="One kind of trouble at a time, with what each costs.")] = False,
    netns: Annotated[bool, typer.Option("--netns", help="As --each: delay, loss and cuts of a real network.")] = False,
    compose: Annotated[bool, typer.Option("--compose", help="As --each: docker compose kill.")] = False,
) -> None:
    """Example: python -m tests.chaos --requests 200 --pause 1"""
    if scale + each + netns + compose > 1:
        raise typer.BadParameter("--scale, --each, --netns and --compose are runs of their own")
    if target not in TARGETS or (compose and target != "demo"):
        raise typer.BadParameter(f"--target {target!r} is none of {', '.join(TARGETS)}; --compose has the demo's alone")
    counts = {"num_gateways": gateways, "num_drafters": drafters, "num_verifiers": verifiers}
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            served = TARGETS[target](Path(folder))
            load = Load(requests, at_once, tokens, pause, seed, served.methods)
            fleet = _Fleet(Path(folder), served, counts)
            if scale:
                ok = _with_progress(lambda advance: _scale(fleet, load, advance))
            elif each:
                ok = _with_progress(lambda advance: _each(fleet, load, only, advance))
            elif netns:
                ok = _with_progress(lambda advance: _netns(fleet, load, only, advance))
            elif compose:
                ok = _with_progress(lambda advance: _compose(load, only, advance))
            else:
                ok = _with_progress(lambda advance: _storm(fleet, load, advance))
    except (NetworkUnavailable, ComposeUnavailable) as missing:
        _console.print(str(missing), style="bold red", highlight=False, markup=False)
        sys.exit(2)
    sys.exit(0 if ok else 1)


def _with_progress(run: Callable[[Advance], Coroutine[Any, Any, show.Told]]) -> bool:
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console) as progress:
        task = progress.add_task("", total=None)
        told = asyncio.run(run(lambda count: progress.advance(task, count)))
    return told(_console)


@dataclass(frozen=True)
class _Fleet:
    """What a fleet is made of."""

    run_dir: Path
    target: Target
    counts: dict[str, int]

    def make(self, **counts: int) -> Fleet:
        return Fleet(self.run_dir, target=self.target, **{**self.counts, **counts})


async def _storm(parts: _Fleet, load: Load, advance: Advance) -> show.Told:
    async with parts.make() as fleet:
        return show.storm(await run_chaos(fleet, load, advance))


async def _scale(parts: _Fleet, load: Load, advance: Advance) -> show.Told:
    async with parts.make(num_drafters=max(SCHEDULE)) as fleet:
        return show.scaling(*await run_scaling(fleet, load, progress=advance))


async def _each(parts: _Fleet, load: Load, only: str, advance: Advance) -> show.Told:
    async with parts.make() as fleet:
        found = await run_faults(fleet.urls, process_faults(fleet), load, only, advance)
        return show.faults(found, await leftovers(fleet))


async def _netns(parts: _Fleet, load: Load, only: str, advance: Advance) -> show.Told:
    with Network() as network:
        how = "tc netem" if network.has_netem else "a wire in user space: this kernel has no netem"
        _console.print(f"==> network namespaces; delay and loss by {how}", highlight=False)
        async with NetnsFleet(parts.run_dir, network, target=parts.target, **parts.counts) as fleet:
            found = await run_faults(fleet.urls, network_faults(fleet), load, only, advance)
            return show.faults(found, await leftovers(fleet))


async def _compose(load: Load, only: str, advance: Advance) -> show.Told:
    async with ComposeStack() as stack:
        return show.faults(await run_faults(stack.urls, stack.faults(), load, only, advance), None)


if __name__ == "__main__":
    typer.run(main)
