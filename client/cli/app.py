"""The `outrider` command, assembled from its subcommands (one file each)."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.client.cli.bench import BenchCommand, bench
from outrider.client.cli.chat import chat
from outrider.client.cli.common import Json, console, print_json
from outrider.client.cli.complete import complete
from outrider.client.cli.demo import demo
from outrider.client.cli.doctor import doctor
from outrider.client.cli.keys import keys_app
from outrider.client.cli.load_draft import load_draft
from outrider.client.cli.pass_on import ALL_ARGUMENTS, audit, certify, drafter, train, verify
from outrider.client.cli.reload import reload
from outrider.client.cli.serve import ServeCommand, serve
from outrider.client.cli.stack import down, up
from outrider.client.cli.status import status
from outrider.shared.version import outrider_version

_HELP = """Lossless speculative decoding for LLM serving.

Exit codes: 0 done, 1 failed, 2 wrong usage or setting, 130 interrupted by Ctrl-C (`up` and `demo` exit with 0).

Examples:

  outrider up --detach && outrider chat "Say hello." && outrider down

  outrider bench --base-url http://localhost:8000 --max-concurrency 4

  outrider --install-completion
"""


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(outrider_version())
        raise typer.Exit


app = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(up)
app.command(cls=ServeCommand)(serve)
app.command()(down)
app.command()(status)
app.command()(complete)
app.command()(chat)
app.command(cls=BenchCommand)(bench)
app.command()(doctor)
app.command()(demo)
app.command()(load_draft)
app.command()(reload)
app.command(context_settings=ALL_ARGUMENTS)(drafter)
app.command(context_settings=ALL_ARGUMENTS)(audit)
app.command(context_settings=ALL_ARGUMENTS)(certify)
app.command(context_settings=ALL_ARGUMENTS)(verify)
app.command(context_settings=ALL_ARGUMENTS)(train)
app.add_typer(keys_app, name="key")


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def version(as_json: Json = False) -> None:
    """Print the version."""
    if as_json:
        print_json({"version": outrider_version()})
    else:
        console.print(outrider_version())
