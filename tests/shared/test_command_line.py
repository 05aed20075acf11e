"""Wrong command lines, of every command: one line that names the option and what to do, exit code 2, within seconds."""

from __future__ import annotations

import asyncio
import functools
import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from outrider.client.cli import common
from outrider.client.cli.app import app
from outrider.shared.command_line import from_arguments, run_command
from outrider.training.commands import errors as training_errors

ROOT = Path(__file__).parents[2]
OUTRIDER = str(Path(sys.executable).with_name("outrider"))
T, H = "models/demo-target", "models/demo-eagle3"
NOBODY = "http://127.0.0.1:9"
# seconds of processor time; what a person waits for on an idle machine, whatever else this one does
MOST_S = 5.0
# Words of the line -> what its answer names.
LINES: dict[tuple[str, ...], str] = {
    ("fly",): "No such command 'fly'",
    ("--versoin",): "Possible options: --version",
    ("up", "--modle", T): "--model",
    ("up", "--model", "nowhere"): "--model: nowhere does not exist",
    ("up", "--model", H): "is a draft head of demo-target, not a model; serve its target",
    ("up", "--draft-model", "nowhere"): "--draft-model: nowhere does not exist",
    ("up", "--port", "abc"): "'--port'",
    ("up", "--port", "70000"): "less than or equal to 65535",
    ("up", "--drafters", "-1"): "'--drafters'",
    ("up", "--dtype", "half"): "'auto', 'bfloat16', 'float16', 'float32'",
    ("up", "--kv-cache-dtype", "int4"): "'auto', 'fp8', 'int8'",
    ("up", "-sc", "{not json"): "--speculative-config is not JSON",
    ("serve",): "MODEL: give the target",
    ("serve", "nowhere"): "nowhere does not exist",
    ("serve", T, "--no-such-option"): "--no-such-option",
    ("serve", T, "--max-model-len", "abc"): "such as 8192, 8k (8000)",
    ("serve", T, "--enable-lora"): "--enable-lora of vLLM is not taken here: adapters are not loaded; merge them",
    ("serve", T, "--port", "x"): "'--port'",
    ("serve", T, "-sc", '{"method": "foo"}'): "method 'foo' is not one of auto, off",
    ("demo", "--onse"): "--once",
    ("demo", "--port", "99999"): "less than or equal to 65535",
    ("down", "--force"): "--force",
    ("status", "--lives"): "--live",
    ("status", "--url", "ftp://x"): "--url",
    ("chat", "hi", "--method"): "'--method' requires an argument",
    ("chat", "hi", "--max-tokens", "0"): "'--max-tokens'",
    ("chat", "hi", "--address", "nonsense"): "--address: nonsense is not host:port",
    ("chat", "hi", "--url", "not-a-url"): "it must begin with http:// or https://",
    ("chat", "hi", "--run-dir", "/nonexistent"): "start one with `outrider up` or give --url",
    ("complete",): "Missing argument 'prompt'",
    ("complete", "x", "--temperature", "-1"): "'--temperature'",
    ("complete", "x", "--url", "x", "--address", "y:1"): "give one of them",
    ("bench", "--num-prompts", "0"): "'--num-prompts'",
    ("bench", "--request-rate", "0"): "'--request-rate'",
    ("bench", "--percentile-metrics", "foo"): "--percentile-metrics: foo is not one of ttft",
    ("bench", "--metric-percentiles", "x"): "--metric-percentiles: 'x' is not a list of numbers",
    ("bench", "--dataset-name", "foo"): "give them with --dataset-path",
    ("bench", "--dataset-path", "no.jsonl", "--base-url", NOBODY): "--dataset-path no.jsonl",
    ("doctor", "--prot", "1"): "--port",
    ("key", "new"): "Missing argument 'name'",
    ("certify",): "Missing argument 'model'",
    ("certify", "nowhere"): "MODEL: nowhere does not exist",
    ("certify", T, "--dtype", "int4"): "'--dtype'",
    ("certify", H): "is a draft head of demo-target, not a model; give its target",
    ("train", "fly"): "No such command 'fly'",
    ("train", "train"): "Missing option '--method'",
    (
        "train",
        "train",
        "--method",
        "e4",
        "--target",
        T,
        "--data",
        "README.md",
        "--output",
        "x",
    ): "must be one of medusa",
    ("train", "export", "--run", "nowhere", "--target", T, "--output", "x"): "--run nowhere: there is no such folder",
    ("train", "evaluate", "--draft-len", "0"): "--draft-len must be at least 1",
    ("train", "prepare-data"): "Missing option '--output'",
    ("train", "prepare-data", "--output", "x", "--temperature", "99"): "--temperature must be within 0 and 10",
    ("train", "auto"): "Missing argument 'MODEL'",
    ("train", "auto", "nowhere"): "MODEL: nowhere does not exist",
    ("train", "auto", T, "--hours", "0"): "--hours must be above 0",
    ("train", "auto", T, "--prompts", "no.jsonl"): "--prompts: no.jsonl does not exist",
    ("audit",): "the following arguments are required: url",
    ("audit", NOBODY, "--nope"): "unrecognized arguments: --nope",
    ("verify",): "Missing argument 'file'",
    ("verify", "nowhere", "--model", T): "nowhere: No such file or directory",
}


def test_the_lines_are_of_every_command() -> None:
    commands = set(typer.main.get_command(app).commands) - {"version", "drafter"}  # type: ignore[attr-defined]
    # A service's command says what is wrong in its log.
    assert {words[0] for words in LINES} >= commands


@pytest.mark.storm
@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_one_line_that_names_it(words: tuple[str, ...]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OUTRIDER_", "OPENAI_"))}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [OUTRIDER, *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=200,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2, done.stdout + done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("outrider: ")
    assert LINES[words] in line
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MOST_S


@pytest.mark.parametrize("words", [("up", "--modle", T), ("fly",), ("complete",), ("status", "--lives")], ids=" ".join)
def test_usage_errors_are_one_line(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same in this process, where it takes no time."""
    monkeypatch.setattr(sys, "argv", ["outrider", *words])
    with pytest.raises(SystemExit) as ended:
        run_command(app, "outrider")
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert LINES[words] in line
    assert " --help` lists what there is" in line


@pytest.mark.parametrize("clear_errors", [common.clear_errors, training_errors.clear_errors])
def test_ctrl_c_before_the_runner_counts_interrupts(
    clear_errors: type[common.clear_errors], monkeypatch: pytest.MonkeyPatch
) -> None:
    install = signal.signal

    def install_and_interrupt(signum: int, handler: Any) -> Any:
        before = install(signum, handler)
        if isinstance(handler, functools.partial):  # the runner's
            signal.raise_signal(signal.SIGINT)
        return before

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(signal, "signal", install_and_interrupt)
        with pytest.raises(typer.Exit) as ended, clear_errors():
            asyncio.run(asyncio.sleep(30.0))
    finally:
        install(signal.SIGINT, before)
    assert ended.value.exit_code == 130


@dataclass(frozen=True)
class Asked:
    name: str
    size: int = 1
    kept: bool = True


def test_settings_are_taken_from_a_commands_arguments() -> None:
    def command(name: str, size: int, other: float) -> Asked:
        folder = "no field"
        return from_arguments(Asked, locals(), size=size + 1)

    assert command("a", 2, 0.5) == Asked("a", 3, kept=True)
