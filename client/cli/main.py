"""The `outrider` command's entry. It imports nothing heavy itself, so that a Ctrl-C meanwhile is one like any other."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from outrider.client.cli.app import app  # takes a third of a second
        from outrider.shared.command_line import run_command

        run_command(app, "outrider")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
