"""reference/cli.md: every command of `outrider`, from the typer apps and argparse parsers themselves."""

from __future__ import annotations

import argparse
import inspect
from types import SimpleNamespace
from typing import Any

import typer
import typer.main

from docs.generate.markdown import cell, code, table
from outrider.client.audit.__main__ import audit_parser, replay_parser
from outrider.client.cli.app import app as outrider_app
from outrider.engine.certify import main as certify
from outrider.offline.verify import app as verify_app
from outrider.training.commands.app import app as train_app

_INTRODUCTION = """# The command `outrider`

`outrider COMMAND --help` prints what is here; the page is made from the command itself.

"""


def command_tree() -> dict[str, Any]:
    """Full names ("train evaluate") and the click commands behind them."""
    certify_app = typer.Typer()
    certify_app.command()(certify)
    # `outrider` hands its arguments on to these programs.
    replaced = {"train": train_app, "certify": certify_app, "verify": verify_app}
    tree: dict[str, Any] = {}
    parsers = {"audit": audit_parser(), "audit replay": replay_parser()}
    for name, command in typer.main.get_command(outrider_app).commands.items():  # type: ignore[attr-defined]
        command = typer.main.get_command(replaced[name]) if name in replaced else command
        _walk(name, command, tree)
    return tree | {name: _command(parser) for name, parser in parsers.items()}


def _command(parser: argparse.ArgumentParser) -> SimpleNamespace:
    """Returns what this page needs of a click command, from an argparse parser."""
    params = [
        SimpleNamespace(
            param_type_name="option" if action.option_strings else "argument",
            name=action.dest,
            opts=action.option_strings,
            secondary_opts=[],
            envvar=None,
            default=action.default,
            required=action.required,
            help=(action.help or "").replace("%(default)s", str(action.default)),
        )
        for action in parser._actions
        if action.dest != "help"
    ]
    return SimpleNamespace(help=parser.description, params=params)


def cli_page() -> str:
    head = inspect.cleandoc(typer.main.get_command(outrider_app).help or "")
    return _INTRODUCTION + head + "\n" + "".join(_section(name, command) for name, command in command_tree().items())


def _walk(name: str, command: Any, tree: dict[str, Any]) -> None:
    tree[name] = command
    for child_name, child in getattr(command, "commands", {}).items():
        _walk(f"{name} {child_name}", child, tree)


def _section(name: str, command: Any) -> str:
    text, _, examples = inspect.cleandoc(command.help or "").partition("Examples:")
    if not examples:
        text, _, examples = text.partition("Example:")
    section = f"\n## outrider {name}\n\n{text.strip()}\n"
    if examples:
        lines = [" ".join(example.split()) for example in examples.split("\n\n") if example.strip()]
        section += "\n```\n" + "\n".join(lines) + "\n```\n"
    rows = [_parameter(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
    return section + ("\n" + table(("argument or option", "default", "what it does"), rows) if rows else "")


def _parameter(parameter: Any) -> list[str]:
    if parameter.param_type_name == "argument":
        shown = code((parameter.name or "").upper())
    else:
        shown = ", ".join(code(option) for option in [*parameter.opts, *parameter.secondary_opts])
    variable = parameter.envvar
    if variable:
        shown += "<br>" + code(variable if isinstance(variable, str) else variable[0])
    default = parameter.default
    if parameter.required:
        default = "required"
    elif default is None or default is False or not isinstance(default, str | int | float | bool) or default == "":
        default = code(default) if _is_path(default) else ""
    else:
        default = code(default)
    return [shown, default, cell(getattr(parameter, "help", "") or "")]


def _is_path(value: object) -> bool:
    return hasattr(value, "__fspath__")
