"""A progress line with an ETA: a live bar on a terminal, a plain line now and then in a log file.

Used by every long command of this package; it has none of its own.
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

_LINE_EVERY_S = 10.0


class Progress:
    """Reports progress: `start`, then `advance` once per item, then `stop`; `say` prints a line at any time."""

    def __init__(self, console: Console, what: str) -> None:
        self._console, self._what = console, what
        self._bar: RichProgress | None = None
        self._task = TaskID(0)
        self._total = self._done = self._done_before = 0
        self._started_at = self._line_at = 0.0

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def start(self, total: int, done: int = 0) -> None:
        """Starts the display. An earlier run has done `done` items of `total`: they count, but not for the speed."""
        self._total, self._done, self._done_before = total, done, done
        self._started_at = self._line_at = time.monotonic()
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("eta"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bar = RichProgress(*columns, console=self._console)
            self._task = self._bar.add_task(self._what, total=total, completed=done, note="")
            self._bar.start()

    def advance(self, note: str = "", done: int | None = None) -> None:
        """Records that one more item is done, or that `done` of them are."""
        self._done = self._done + 1 if done is None else done
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, note=note)
            return
        now = time.monotonic()
        if now - self._line_at >= _LINE_EVERY_S or self._done == self._total:
            self._line_at = now
            done_now = max(1, self._done - self._done_before)
            eta_s = (self._total - self._done) * (now - self._started_at) / done_now
            self.say(f"{self._what} {self._done}/{self._total}  eta {eta_s / 60:.1f} min  {note}")

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
