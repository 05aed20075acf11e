"""The `outrider` command: its parts put together. One command or family of commands is one file, cli_*.py."""

from __future__ import annotations

import sys

import typer

from client.cli_bench import bench
from client.cli_chat import chat
from client.cli_common import Json, console, print_json
from client.cli_complete import complete
from client.cli_doctor import doctor
from client.cli_pass_on import ALL_ARGUMENTS, certify, train
from client.cli_serve import serve
from client.cli_stack import demo, down, up
from client.cli_status import status
from client.keys_cli import keys_app
from shared.version import outrider_version

_HELP = """Lossless speculative decoding for LLM serving.

Exit codes: 0 done, 1 failed, 2 wrong usage or setting, 130 interrupted by Ctrl-C (which is how `up` and `demo` end: 0).

Examples:

  outrider up --detach && outrider chat "Say hello." && outrider down

  outrider bench --base-url http://localhost:8000 --max-concurrency 4

  outrider --install-completion
"""

app = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(up)
app.command()(serve)
app.command()(down)
app.command()(status)
app.command()(complete)
app.command()(chat)
app.command()(bench)
app.command()(doctor)
app.command()(demo)
app.command(context_settings=ALL_ARGUMENTS)(certify)
app.command(context_settings=ALL_ARGUMENTS)(train)
app.add_typer(keys_app, name="key")


@app.command()
def version(as_json: Json = False) -> None:
    """Print the version."""
    if as_json:
        print_json({"version": outrider_version()})
    else:
        console.print(outrider_version())


def main() -> None:
    app()


if __name__ == "__main__":
    sys.exit(app())
