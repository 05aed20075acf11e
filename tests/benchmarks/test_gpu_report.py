"""The GPU report's reading of pytest, its table and rows, and that its tests need none of the services' libraries."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.gpu import report as gpu_report
from benchmarks.gpu.report import Finding, findings_of, main, save_rows, table, timed

ROOT = Path(__file__).parents[2]
# What a machine that was lent for its GPU has not.
_MISSING = ("redis", "fastapi", "uvicorn", "hypothesis", "pytest_asyncio", "xdist", "pytest_timeout", "httpx", "openai")


def test_outcomes_are_counted_by_file(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\n"
        "def test_right(): pass\n\n"
        "def test_wrong(): assert False\n\n"
        "@pytest.mark.skip(reason='shown')\n"
        "def test_left_out(): pass\n"
    )
    (tmp_path / "test_other.py").write_text("def test_right(): pass\n")
    (tmp_path / "test_broken.py").write_text("import no_such_library\n")
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", f"--rootdir={tmp_path}", str(tmp_path)]
    command.append("--continue-on-collection-errors")
    subprocess.run([*command, f"--junit-xml={report}"], check=False, capture_output=True, timeout=120)
    found = list(findings_of(report))
    assert [(finding.what, finding.measured, finding.verdict) for finding in found] == [
        ("test_broken", "1 error", "FAILED"),
        ("test_other", "1 passed", "met"),
        ("test_some", "1 failure, 1 passed, 1 skipped", "FAILED"),
    ]


def test_rows_and_table_hold_every_finding(tmp_path: Path) -> None:
    findings = [Finding("tests", "[a]", "3 passed"), timed("step", "exact", "5 ms", "< 4 ms", met=False, us=5000.0)]
    console = Console(width=120, file=io.StringIO())
    console.print(table(findings, "a device"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(word in text for word in ("a device", "[a]", "exact", "< 4 ms", "missed"))
    for _ in range(2):
        save_rows(tmp_path / "gpu.jsonl", findings, "a device")
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [row["what"] for row in rows] == ["[a]", "exact"] * 2
    assert rows[1]["us"] == 5000.0
    assert rows[1]["versions"]["torch"] == torch.__version__


def test_without_a_device_it_says_so_and_exits_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    app = typer.Typer()
    app.command()(main)
    outcome = CliRunner().invoke(app, [])
    assert outcome.exit_code == 2
    assert "no CUDA device" in outcome.output


@pytest.mark.storm
def test_its_tests_are_found_without_the_services_libraries(tmp_path: Path) -> None:
    """With triton's interpreter in place of a GPU, and a finding for each file."""
    code = (
        "import sys\n"
        f"for name in {_MISSING!r}: sys.modules[name] = None\n"
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *rest: None if name in {_MISSING!r} else find(name, *rest)\n"
        "import pytest\n"
        "raise SystemExit(pytest.main(sys.argv[1:]))\n"
    )
    options = ["-c", "tests/gpu.ini", "--rootdir", ".", "-m", "gpu", "--collect-only", "-qq"]
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", code, *options, *map(str, gpu_report.marked_files())]
    outcome = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "tests/kernels/test_linear_triton.py" in outcome.stdout
