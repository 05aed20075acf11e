"""`python -m outrider.training` is `outrider train`."""

from __future__ import annotations

from outrider.shared.command_line import run_command
from outrider.training.commands.app import app

if __name__ == "__main__":
    run_command(app, "outrider train")
