"""The command over a real port: exit codes, files, replays, and what the small wheel may import."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from outrider.client.audit.__main__ import main
from tests.audit.fake_server import FakeServer, serve
from tests.ports import nobodys_port
from tests.source_tree import SourceTree

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "client/audit"


def test_a_broken_server_is_exit_code_1_with_a_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / name for name in ("json", "html", "replay")}
    given = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    with serve(FakeServer("overshoot")) as url:
        assert main([url, "--tests", "fields,usage", *given]) == 1
        printed = capsys.readouterr().out
        assert "broken" in printed
        report = json.loads(files["json"].read_text())
        assert report["conclusion"] == "broken"
        assert "<script" not in files["html"].read_text()
        assert main(["replay", str(files["replay"]), "--url", url]) == 0
    again = capsys.readouterr().out
    assert "fields: max_tokens: expected no more than max_tokens" in again
    assert "now" in again


def test_a_correct_server_is_exit_code_0() -> None:
    with serve(FakeServer()) as url:
        assert main([url, "--tests", "usage"]) == 0


def test_no_server_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"http://127.0.0.1:{nobodys_port()}"]) == 3
    assert re.search(
        r"cannot audit http://\S+: no answer: \[Errno \d+\] Connection refused$", capsys.readouterr().err.strip()
    )


@pytest.mark.parametrize(
    "given",
    [["http://x", "--tests", "nothing"], ["http://x", "--body", "[]"], ["http://x", "--budget", "0"], []],
)
def test_wrong_usage_is_exit_code_2(given: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(given)
    assert caught.value.code == 2


@pytest.mark.parametrize("line", ["{}", "not JSON", '{"test":"","expected":"","path":"","requests":[{}],"texts":[]}'])
def test_a_line_that_is_no_replay_is_named(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text(line)
    assert main(["replay", str(tmp_path / "file"), "--url", "http://127.0.0.1:1"]) == 2
    assert "line 1" in capsys.readouterr().err


def test_the_folder_needs_numpy_and_httpx_alone() -> None:
    """Its imports are relative, so that the wheel has it under another name."""
    tree = SourceTree(ROOT)
    files = sorted(FOLDER.glob("*.py"))
    assert len(files) > 5
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level in (0, 1), path
                assert node.level == 1 or not (node.module or "").startswith("outrider"), path
        outside = {name.split(".")[0] for name in tree.imports(path)} - {"outrider"}
        assert outside - set(sys.stdlib_module_names) <= {"numpy", "httpx"}, path
