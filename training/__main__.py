"""`python -m outrider.training` is `outrider train`."""

from __future__ import annotations

from outrider.training.commands.app import app

if __name__ == "__main__":
    app(prog_name="outrider train")
