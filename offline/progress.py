"""A batch's progress bar on stderr: requests, tokens per second, accepted draft tokens."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.gateway.request.types import GenerationUpdate


class BatchProgress:
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

    def __enter__(self) -> BatchProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

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
