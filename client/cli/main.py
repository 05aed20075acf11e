"""The `outrider` command's entry. It imports nothing heavy itself, so that a Ctrl-C meanwhile is one like any other."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from outrider.client.cli.app import app  # takes a third of a second

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
