"""Ends the training commands: errors as one line; exit codes 0 done, 1 failed, 2 invalid option, 130 stopped."""

from __future__ import annotations

from types import TracebackType

import typer
from rich.console import Console

from outrider.shared.command_line import CTRL_C
from outrider.shared.errors import ConfigError, OutriderError
from outrider.training.errors import SettingError, TrainingError

_OURS = "outrider"


class clear_errors:
    """A command's context: turns our errors, Ctrl-C and missing packages into typer.Exit."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = exit_code(error)
        if code is not None:
            Console(stderr=True, highlight=False).print(
                f"outrider: {_words(error)}", style="red", markup=False, soft_wrap=True
            )
            raise typer.Exit(code) from None


def exit_code(error: BaseException | None) -> int | None:
    """The exit status for an error; None for success and for bugs, which keep their traceback."""
    if isinstance(error, CTRL_C):
        return 130
    if isinstance(error, SettingError | ConfigError) or _is_missing_package(error):
        return 2
    return 1 if isinstance(error, TrainingError | OutriderError) else None


def _is_missing_package(error: BaseException | None) -> bool:
    return isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] != _OURS


def _words(error: BaseException | None) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"this needs package {error.name}: pip install 'outrider[engine,train]'"
    if isinstance(error, CTRL_C):
        return str(error) or "stopped; repeat the command to continue from here"
    return str(error)
