"""Progress on stderr: the steps of loading; of a batch its requests, tokens per second and accepted draft tokens."""

from __future__ import annotations

import logging
import time
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from outrider.gateway.request.types import GenerationUpdate


class _Shown:
    """Draws `_progress` while it is entered."""

    _progress: Progress

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._progress.stop()


class LoadProgress(_Shown, logging.Handler):
    """A line with the step of loading and the seconds so far, while it lasts; nothing where nobody would see it move.

    log: of the code that loads. Whatever is set up for the logger "outrider.offline" gets its records too.
    """

    def __init__(self, model: str, *, shown: bool) -> None:
        super().__init__()
        self.log = logging.Logger("outrider.offline", logging.INFO)
        self.log.addHandler(self)
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        hidden = not shown or not (console.is_terminal or console.is_jupyter)
        self._progress = Progress(*columns, console=console, disable=hidden, transient=True)
        self._loading = f"loading {model}"
        self._task = self._progress.add_task(self._loading, total=None)

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.update(self._task, description=f"{self._loading}: {record.getMessage()}")
        public = logging.getLogger(record.name)
        if public.isEnabledFor(record.levelno):
            public.handle(record)


class BatchProgress(_Shown):
    """shown: None: if stderr is a terminal or a notebook; True without one: a single line at the end."""

    def __init__(self, num_requests: int, shown: bool | None) -> None:
        console = Console(stderr=True)
        if shown is None:
            shown = console.is_terminal or console.is_jupyter
        columns = (
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, disable=not shown)
        self._task = self._progress.add_task("", total=num_requests, figures="")
        self._started = time.perf_counter()
        self._num_tokens = self._num_drafted = self._num_accepted = 0

    def add(self, update: GenerationUpdate) -> None:
        self._num_tokens += len(update.token_ids)
        if update.speculation is not None:
            self._num_drafted += update.speculation.num_draft_tokens
            self._num_accepted += update.speculation.num_accepted_draft_tokens
        self._progress.update(self._task, figures=self._figures())

    def request_ended(self) -> None:
        self._progress.advance(self._task)

    def _figures(self) -> str:
        rate = f"{self._num_tokens / (time.perf_counter() - self._started):.0f} tokens/s"
        return f"{rate}, {self._num_accepted / self._num_drafted:.0%} accepted" if self._num_drafted else rate
