"""The files in docs/examples/, each as its reader would run it, against a running stack."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from e2e_stack import RunningStack

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "docs" / "examples"
REST, GRPC = "REST", "gRPC"
DOORS = {
    "client_async.py": GRPC,
    "client_batch.py": GRPC,
    "client_blocking.py": GRPC,
    "curl.sh": REST,
    "grpcurl.sh": GRPC,
    "langchain_completion.py": REST,
    "openai_package.py": REST,
}


def output_of(stack: RunningStack, name: str, **environ: str) -> str:
    """Standard output of the example; fails the test unless it ends well."""
    door = stack.state.grpc_address if DOORS[name] == GRPC else f"{stack.url}/v1"
    if name == "curl.sh":
        door = stack.url
    command = [sys.executable] if name.endswith(".py") else ["bash"]
    done = subprocess.run(
        [*command, str(EXAMPLES / name), door],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def import_os(stack: RunningStack) -> str:
    """The greedy text that several examples ask for."""
    body = {"prompt": "import os", "max_tokens": 32, "temperature": 0}
    text: str = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]
    return text


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")} == DOORS.keys()


def test_openai_package(stack: RunningStack, import_os: str) -> None:
    assert output_of(stack, "openai_package.py").startswith(f"{import_os}\n")


def test_client_blocking(stack: RunningStack, import_os: str) -> None:
    said = output_of(stack, "client_blocking.py")
    assert said.startswith(f"{import_os}\n32 tokens, log-probability -")
    assert re.search(r"^(accepted|bonus) +'", said, re.MULTILINE)
    assert re.search(r"^\d\.\d\d tokens per round$", said, re.MULTILINE)
    assert said.splitlines()[-1] in ("left", "right")


def test_client_async(stack: RunningStack, import_os: str) -> None:
    lines = output_of(stack, "client_async.py").splitlines()
    parts = [line.removeprefix("import os: ") for line in lines if line.startswith("import os: ")]
    assert "".join(ast.literal_eval(part) for part in parts) == import_os
    assert any(line.startswith("def main():") for line in lines)


def test_client_batch(stack: RunningStack) -> None:
    said = output_of(stack, "client_batch.py")
    assert [number for number in range(12) if f"def power_{number}(x):\n    return" in said] == list(range(12))


def test_curl(stack: RunningStack, import_os: str) -> None:
    first, *events = output_of(stack, "curl.sh").splitlines()
    assert json.loads(first)["choices"][0]["text"] == import_os
    assert events[0].startswith("id: ")
    assert events[-2:] == ["data: [DONE]", ""]


def test_grpcurl(stack: RunningStack, import_os: str, tmp_path: Path) -> None:
    """Run with grpcurl where it is installed, else with what does the same."""
    if shutil.which("grpcurl") is None:
        program = tmp_path / "grpcurl"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT / "tests/e2e/e2e_grpcurl.py"} "$@"\n')
        program.chmod(0o755)
    said = output_of(stack, "grpcurl.sh", PATH=f"{tmp_path}:{os.environ['PATH']}")
    texts = re.findall(r'^  "text": ("(?:[^"\\]|\\.)*")', said, re.MULTILINE)
    assert "".join(json.loads(text) for text in texts) == import_os


@pytest.mark.storm
def test_langchain(stack: RunningStack, import_os: str, tmp_path: Path) -> None:
    """Its 15 packages are for this one example, so they are installed for it alone."""
    if importlib.util.find_spec("langchain_openai") is None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        pip += ["-c", str(ROOT / "deploy/constraints.txt"), "--target", str(tmp_path)]
        subprocess.run([*pip, "langchain-openai"], check=True, timeout=280)
    assert import_os in output_of(stack, "langchain_completion.py", PYTHONPATH=str(tmp_path))
