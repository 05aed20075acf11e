"""Commands that run another program of the distribution: the client itself never loads torch."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import NoReturn

import typer

ALL_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def certify(context: typer.Context) -> None:
    """Prove on a model that exact mode holds on this machine; `outrider certify --help` lists the options."""
    _become("outrider.engine.certify", context.args)


def drafter(context: typer.Context) -> None:
    """Serve draft tokens to gateways and to other engines; `outrider drafter --help` lists the options."""
    _become("outrider.drafter_service", context.args)


def verify(context: typer.Context) -> None:
    """Draw every token of an answer with a receipt again; `outrider verify --help` lists the options."""
    _become("outrider.offline.verify", context.args)


def audit(context: typer.Context) -> None:
    """Test over HTTP whether any server's speculation changes its output; `outrider audit --help` lists the options."""
    if find_spec("numpy") is None:
        typer.echo("outrider audit needs numpy: pip install numpy, or pip install outrider-audit", err=True)
        raise typer.Exit(2)
    _become("outrider.client.audit", context.args)


def train(context: typer.Context) -> None:
    """Train draft heads: prepare-data, train, export, evaluate; `outrider train --help` lists the options."""
    _become("outrider.training", context.args)


def _become(module: str, arguments: list[str]) -> NoReturn:
    """Replaces this process by the other program: it gets Ctrl-C, and its exit code is ours."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
