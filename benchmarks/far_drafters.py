"""What asking ahead and hedging bring with drafters that are far away: `python -m benchmarks.far_drafters`.

One verifier and two drafters, each behind a link that delays (benchmarks/simulation/link.py), and a gateway per way of
asking. The same prompts go to the gateways in turn, back and forth, one stream. Figures: tokens/s, and of the time
between two updates of the stream the median and the 99th percentile. `of plain asking` is what counts.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.load import LoadResult, Shape, run_load
from benchmarks.prompts import code_prompts
from benchmarks.records import quantiles
from benchmarks.simulation.link import DelayedLink
from benchmarks.simulation.stack import METHOD, expanded_target, plain
from outrider.client.stack.commands import StackSettings, gateway_command
from outrider.client.stack.own_redis import redis_url_of
from outrider.client.stack.process import spawn
from outrider.client.stack.processes import Stack

console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
WAYS = {
    "plain": ("--draft-ahead", "false"),
    "ahead": ("--draft-ahead", "true"),
    "hedged": ("--draft-ahead", "false", "--hedge-drafters", "true"),
}


class _FarStack(Stack):
    """A stack with a link before each drafter, and one gateway more for each way of asking but the first."""

    def __init__(self, settings: StackSettings, run_dir: Path, links: list[DelayedLink]) -> None:
        super().__init__(settings, run_dir, console.print)
        self._links = links
        self.urls: dict[str, str] = {}

    def _gateway_command(self) -> list[str]:
        self.state.drafters = [
            link.start(address) for link, address in zip(self._links, self.state.drafters, strict=True)
        ]
        return [*gateway_command(self._settings, self.state), *WAYS["plain"]]

    def start_gateways(self) -> None:
        self.urls["plain"] = self.state.url
        for way, options in WAYS.items():
            if way != "plain":
                command = [*gateway_command(self._settings, self.state), *options]
                self._log_path(way).unlink(missing_ok=True)
                environment = {"OUTRIDER_REDIS_URL": redis_url_of(self.state)}
                self._processes[way] = spawn(self._run_dir, way, command, environment)
                self.state.record(way, self._processes[way].pid)
                self.state.commands[way] = command
                self.urls[way] = f"http://{self._wait_serving(way)}"


def main(
    target: Annotated[Path, typer.Option(help="Small target to expand.")] = Path("models/demo-target"),
    draft: Annotated[Path, typer.Option(help="Draft model.")] = Path("models/demo-draft"),
    rtt_ms: Annotated[float, typer.Option(help="Round-trip time.")] = 20.0,
    jitter: Annotated[float, typer.Option(help="Each way takes 1 - jitter to 1 + jitter times its delay.")] = 0.5,
    late_share: Annotated[float, typer.Option(help="Share of pieces that come six times as late.")] = 0.0,
    length: Annotated[int, typer.Option(help="Draft tokens; 0: auto.")] = 5,
    prompts: Annotated[int, typer.Option(help="Prompts per cell.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Cells per way, in turn.")] = 3,
) -> None:
    """Example: python -m benchmarks.far_drafters --rtt-ms 100 --length 8"""
    shape = Shape(max_tokens, METHOD, length) if length else Shape(max_tokens, "auto", 8)
    found: dict[str, list[LoadResult]] = {way: [] for way in ("off", *WAYS)}
    with ExitStack() as exits:
        expanded = exits.enter_context(expanded_target(target, console.print))
        links = [exits.enter_context(DelayedLink()) for _ in range(2)]
        settings = StackSettings(
            model=str(expanded), draft_model=str(draft), methods=(METHOD,), port=0, grpc_port=-1, num_drafters=2
        )
        stack = _FarStack(settings, Path(exits.enter_context(tempfile.TemporaryDirectory())), links)
        exits.callback(stack.stop)
        stack.start()
        stack.start_gateways()
        texts = code_prompts(prompts)
        for link in links:
            link.set_delay(rtt_ms * 1e-3, jitter, late_share)
        for url in stack.urls.values():
            asyncio.run(run_load(url, texts, shape, 1))  # fills the prefix cache; trials and quantiles settle
        for index in range(rounds):
            for way in list(found)[:: -1 if index % 2 else 1]:
                wanted = plain(max_tokens) if way == "off" else shape
                found[way].append(asyncio.run(run_load(stack.urls.get(way, stack.urls["plain"]), texts, wanted, 1)))
    _show(f"{rtt_ms:g} ms, jitter {jitter:g}, {late_share:.1%} late, draft {length or 'auto'}", found)


def _show(title: str, found: dict[str, list[LoadResult]]) -> None:
    table = Table("way", "tokens/s", "of plain asking", "p50 ms", "p99 ms", "each", title=title)
    rates = {way: [result.tokens_per_s for result in results] for way, results in found.items()}
    for way, results in found.items():
        gaps = quantiles([gap for result in results for request in result.requests for gap in request.pieces_s])
        table.add_row(
            way,
            f"{median(rates[way]):.1f}",
            f"{median(rates[way]) / median(rates['plain']):.3f}",
            *(f"{gaps[name] * 1e3:.1f}" for name in ("p50", "p99")),
            " ".join(f"{rate:.0f}" for rate in rates[way]),
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
