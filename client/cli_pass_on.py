"""Commands that other programs of the distribution carry out: the client itself never loads torch."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

ALL_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def certify(context: typer.Context) -> None:
    """Prove on a model that exact mode holds on this machine; `outrider certify --help` lists the options."""
    _become("engine.certify", context.args)


def train(context: typer.Context) -> None:
    """Make draft heads: prepare-data, train, export, evaluate; `outrider train --help` lists the options."""
    _become("training", context.args)


def _become(module: str, arguments: list[str]) -> NoReturn:
    """This process becomes the other program: Ctrl-C reaches it alone, and its exit code is ours."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
