"""A file of rows survives being cut anywhere: whole rows stay, a torn one goes, and one process writes at a time."""

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.training.data.jsonl_file import JsonlFile
from outrider.training.errors import DataError

ROWS = [{"id": index, "text": "é\n" * index} for index in range(4)]


def write_rows(path: Path) -> bytes:
    with JsonlFile(path) as file:
        for row in ROWS:
            file.append(row)
    return path.read_bytes()


def test_cut_at_every_byte(tmp_path: Path) -> None:
    whole = write_rows(tmp_path / "whole.jsonl")
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    path = tmp_path / "cut.jsonl"
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        with JsonlFile(path) as file:
            num_whole = sum(end <= length for end in ends)
            # A line that lacks its break only is whole.
            num_rows = num_whole + (length + 1 in ends)
            assert file.rows == ROWS[:num_rows]
            file.append({"id": "next"})
        with JsonlFile(path) as file:
            assert file.rows == [*ROWS[:num_rows], {"id": "next"}]
            assert file.num_repaired_bytes == 0


def test_keep_rows(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_rows(path)
    with JsonlFile(path) as file:
        file.keep_rows(2)
        file.append({"id": "again"})
    with JsonlFile(path) as file:
        assert file.rows == [*ROWS[:2], {"id": "again"}]


@pytest.mark.parametrize("line", [b"{bad\n", b"[1]\n"])
def test_a_bad_line_inside_is_not_repaired(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    content = b'{"id": 1}\n' + line + b'{"id": 2}\n'
    path.write_bytes(content)
    with pytest.raises(DataError, match="line 2"):
        JsonlFile(path)
    assert path.read_bytes() == content


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    with JsonlFile(path):
        code = "from pathlib import Path; from outrider.training.data.jsonl_file import JsonlFile; "
        code += f"JsonlFile(Path({str(path)!r}))"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert other.returncode == 1
    assert "is being written by another process" in other.stderr
