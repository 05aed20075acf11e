"""A JSONL file that grows by whole lines and survives truncation anywhere.

One process writes at a time (advisory lock). A partial last line, left by a kill or a full disk, is removed when the
file is opened again.
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outrider.training.errors import DataError


class JsonlFile:
    """Opens a file for appending, creating it. rows: its previous content. Raises DataError for an invalid line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.num_repaired_bytes = self._cut_torn_line()
            self.rows = self._read()
        except BlockingIOError:
            self._file.close()
            raise DataError(f"{path} is being written by another process") from None
        except BaseException:
            self._file.close()
            raise

    def append(self, row: dict[str, Any]) -> None:
        """Writes one row as one line, unbuffered."""
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def keep_rows(self, num_rows: int) -> None:
        """Truncates the file to its first `num_rows` rows, as they were when it was opened."""
        self._file.seek(0)
        kept = [self._file.readline() for _ in range(num_rows)]
        self._file.truncate(sum(map(len, kept)))
        self.rows = self.rows[:num_rows]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cut_torn_line(self) -> int:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        # A last line without a line break may be complete (from an editor); it is kept if it parses.
        if whole < len(content) and _parses(content[whole:]):
            self._file.write(b"\n")
            self._file.flush()
            return 0
        self._file.truncate(whole)
        return len(content) - whole

    def _read(self) -> list[dict[str, Any]]:
        self._file.seek(0)
        return [parse_line(self.path, number, line) for number, line in enumerate(self._file, 1) if line.strip()]


def _parses(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Parses one line as an object. Raises DataError with file and line."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number} must be an object, got {type(row).__name__}")
    return row
