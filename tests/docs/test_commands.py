"""Every command that the documentation shows: run against a real stack or, where its note says so, checked to exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.generate.cli_page import cli_page
from tests.docs.blocks import NO_COMMANDS, ROOT, Block, blocks, inline_code, page_blocks, pages
from tests.docs.command_checks import NoSuchCommand, check_text, is_command, known_flags

pytestmark = pytest.mark.storm

# A first completion on a busy machine.
TIMEOUT_S = 280
BLOCKS = blocks()
# The log tells of what was there once; the page of recipes has the options of vLLM.
PROSE = [page for page in pages() if page.name not in ("log.md", "recipes.md")]
# Flags of other programs that the prose names.
FOREIGN_FLAGS = {
    "--strict",
    "--netns",
    "--scale",
    "--each",
    "--compose",
    "--full",
    "--shape",
    "--drafter",
    "--llama-head",
    "--cells",
    "--context",
    "--lengths",
    "--llama-server",
    "--xllamacpp",
    "--vllm",
    "--head",
    "--plot",
    # SGLang's
    "--speculative-num-draft-tokens",
    "--speculative-eagle-topk",
    "--page-size",
}


def unique(check: str) -> list[Block]:
    """Blocks with this note; what README and docs both show is run once."""
    return list({block.text: block for block in BLOCKS if block.check.split(",")[0] == check}.values())


def test_every_block_says_how_it_is_checked() -> None:
    unknown = [
        f"{block}: {block.check or 'no note'}"
        for block in BLOCKS
        if block.language not in NO_COMMANDS
        and block.check.split(",")[0] not in ("stack", "run", "options", "not ours")
    ]
    assert not unknown
    assert len(unique("stack")) == 1
    assert len(unique("run")) >= 8


def test_a_block_without_a_note_is_found() -> None:
    [block] = page_blocks("page.md", "Text\n\n```\nmake up\n```\n")
    assert (block.line, block.check, block.text) == (3, "", "make up")


@pytest.mark.parametrize(
    "command",
    [
        *("make fly", "make up MODLE=x", "outrider fly", "outrider up --modle x", "python -m no_such_module"),
        *(
            "python -m outrider.gateway --prot 1",
            "docker compose up --scale drafters=3",
            "kubectl apply -k deploy/none",
            "helm install outrider deploy/kubernetes/none",
        ),
        *("pip install 'outrider[none]'", "curl http://127.0.0.1:8000/v1/none", "rm -rf x"),
    ],
)
def test_what_is_not_there_is_found(command: str) -> None:
    with pytest.raises(NoSuchCommand):
        check_text(command)


@pytest.mark.parametrize("block", unique("options"), ids=str)
def test_options_exist(block: Block) -> None:
    check_text(block.text)


def test_examples_of_the_command_help() -> None:
    examples = list(page_blocks("reference/cli.md", cli_page()))
    assert len(examples) > 8
    for block in examples:
        check_text(block.text)


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_commands_and_flags_in_the_prose(page: Path) -> None:
    for code in inline_code(page):
        if is_command(code):
            check_text(code.replace("…", "x"))
        elif code.startswith("--"):
            assert code.split()[0].split("/")[0] in known_flags() | FOREIGN_FLAGS, code


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_files_that_the_prose_names(page: Path) -> None:
    for code in inline_code(page):
        if re.fullmatch(
            r"(benchmarks|client|deploy|docs|drafter_service|engine|examples|gateway|kernels|models|offline|"
            r"protos|shared|tests|training|verifier_service)/[\w./-]*",
            code,
        ):
            assert (ROOT / code).exists(), code


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a clone with its .venv made; what commands write stays in it."""
    folder = tmp_path_factory.mktemp("clone")
    for entry in ROOT.iterdir():
        if entry.name not in (".venv", ".run", ".git"):
            (folder / entry.name).symlink_to(entry)
    venv = folder / ".venv"
    venv.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if not entry.name.endswith("-done"):
            (venv / entry.name).symlink_to(entry)
    # The setup is not tried again here: it would install this folder in place of the clone.
    for stamp in (".venv-done", ".protos-done", ".setup-done"):
        (venv / stamp).touch()
    return folder


class DocumentedStack:
    """The stack that the documentation's own command started, on ports of its own."""

    def __init__(self, workspace: Path) -> None:
        self._workspace = workspace
        with socket.socket() as rest, socket.socket() as grpc:
            rest.bind(("127.0.0.1", 0))
            grpc.bind(("127.0.0.1", 0))
            self._ports = {"8000": str(rest.getsockname()[1]), "8001": str(grpc.getsockname()[1])}

    def run(self, text: str, language: str = "") -> str:
        """Standard output; fails the test when the command fails."""
        for documented, port in self._ports.items():
            text = text.replace(f"127.0.0.1:{documented}", f"127.0.0.1:{port}")
        venv_bin = str(self._workspace / ".venv/bin")
        shell = [f"{venv_bin}/python", "-c"] if language == "python" else ["bash", "-euo", "pipefail", "-c"]
        environ = {
            # What was set for this run of the tests is not for the commands.
            **{name: value for name, value in os.environ.items() if not name.startswith(("OUTRIDER_", "MAKE"))},
            "PATH": f"{venv_bin}:{os.environ['PATH']}",
            "PORT": self._ports["8000"],
            "GRPC_PORT": self._ports["8001"],
            "COLUMNS": "120",
        }
        done = subprocess.run(
            [*shell, text],
            cwd=self._workspace,
            env=environ,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def documented_stack(workspace: Path) -> Iterator[DocumentedStack]:
    assert shutil.which("curl"), "the documentation's commands need curl"
    stack = DocumentedStack(workspace)
    [start] = unique("stack")
    try:
        stack.run(start.text)
        yield stack
    finally:
        stack.run("make down")


@pytest.mark.parametrize("block", unique("run"), ids=str)
def test_commands_run(block: Block, documented_stack: DocumentedStack) -> None:
    output = documented_stack.run(block.text, block.language)
    assert output.strip()
    if output.startswith("{"):
        assert "error" not in json.loads(output)
