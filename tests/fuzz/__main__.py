"""`python -m tests.fuzz --inputs 100000`: exit code 1 when an input did what no input may do."""

from __future__ import annotations

import faulthandler
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tests.fuzz.campaign import Target, run_target
from tests.fuzz.checkpoint_files import checkpoint_targets
from tests.fuzz.grpc_servers import grpc_targets
from tests.fuzz.parsers import parser_targets
from tests.fuzz.rest_server import rest_targets
from tests.fuzz.tally import Tally
from tests.fuzz.victim import Bystander, running_victim

# A target that takes longer hangs: the stacks are printed and the process ends.
_TARGET_HANGS_S = 900.0
_console = Console(width=140)
Progress = Callable[[str], None]


def main(
    inputs: Annotated[int, typer.Option(min=1, help="How many, over all targets together.")] = 100_000,
    only: Annotated[str, typer.Option(help="Targets with this in their name: gRPC, OpenAPI, bodies, parser.")] = "",
    seed: Annotated[int, typer.Option(help="Of all that is random.")] = 0,
) -> None:
    """Example: python -m tests.fuzz --inputs 2000 --only gRPC"""
    faulthandler.enable()
    tally = Tally()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        _console.print("==> starting Redis, verifier, drafter and gateway")
        fuzz(Path(folder), inputs, only, seed, tally, lambda line: _console.print(line, highlight=False))
    show(tally)
    sys.exit(1 if tally.findings else 0)


def fuzz(
    run_dir: Path, num_inputs: int, only: str, seed: int, tally: Tally, progress: Progress = lambda _line: None
) -> None:
    """Everything that can be fuzzed, each target with the same share."""
    with (
        running_victim(run_dir) as victim,
        grpc_targets(victim) as grpc_servers,
        rest_targets(victim) as rest_server,
        checkpoint_targets() as checkpoints,
    ):
        bystander = Bystander(victim)
        bystander.start()
        _run([*grpc_servers, *rest_server, *parser_targets(), *checkpoints], num_inputs, only, seed, tally, progress)
        bystander.stop()
        tally.num_bystander_streams = bystander.num_streams
        if bystander.problem:
            tally.findings.append(bystander.problem)
        try:
            victim.check_nothing_is_held()
        except Exception as error:
            tally.findings.append(f"after all of it: {error}")


def _run(
    targets: Sequence[Target[Any]], num_inputs: int, only: str, seed: int, tally: Tally, progress: Progress
) -> None:
    chosen = [target for target in targets if only in target.name]
    # Operations without parameters have one request each: their share goes to those that come after them.
    for place, target in enumerate(chosen):
        faulthandler.dump_traceback_later(_TARGET_HANGS_S, exit=True)
        share = -(-(num_inputs - tally.num_inputs) // (len(chosen) - place))
        run_target(target, share, seed * 1_000 + place, tally)
        progress(f"{tally.num_inputs} inputs, {len(tally.findings)} findings; done: {target.name}")
    faulthandler.cancel_dump_traceback_later()


def show(tally: Tally) -> None:
    table = Table("target", "inputs", "slowest, s", "what came of them")
    for name, counter in tally.outcomes.items():
        told = ", ".join(f"{outcome} {count}" for outcome, count in counter.most_common())
        table.add_row(name, str(counter.total()), f"{tally.slowest_s[name]:.2f}", told)
    _console.print(table, highlight=False)
    _console.print(f"{tally.num_inputs} inputs; the bystander streamed {tally.num_bystander_streams} times beside them")
    for finding in tally.findings:
        _console.print(f"FINDING {finding}", style="bold red", highlight=False, markup=False)
    if not tally.findings:
        _console.print("no answer but on purpose, nobody died, hung or held anything, the bystander's bytes are right")


if __name__ == "__main__":
    typer.run(main)
