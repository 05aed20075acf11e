"""`python -m training` is `outrider train`."""

from __future__ import annotations

from training.cli import app

if __name__ == "__main__":
    app(prog_name="outrider train")
