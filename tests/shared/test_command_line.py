"""Wrong command lines, of every command: one line that names the option and what to do, exit code 2, within seconds."""

from __future__ import annotations

import asyncio
import functools
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from outrider.client.cli import common
from outrider.client.cli.app import app
from outrider.shared.command_line import from_arguments, run_command
from outrider.training.commands import errors as training_errors
from tests.ports import nobodys_port, server_port

ROOT = Path(__file__).parents[2]
OUTRIDER = str(Path(sys.executable).with_name("outrider"))
# seconds of processor time; what a person waits for on an idle machine, whatever else this one does
MOST_S = 5.0
_STARTS = ("serve", "up", "demo")
# Line -> what its answer names. {nobody}: a port that nobody listens on; {busy}: one that is taken.
LINES = {
    "fly": "No such command 'fly'",
    "--versoin": "Possible options: --version",
    "serv models/demo-target": "Did you mean 'serve'?",
    "serve models/demo-target --max-model-len abc": "such as 8192, 8k (8000)",
    "serve": "MODEL: give the target: a checkpoint folder, a .gguf file or a Hub id",
    "serve no/such/folder": "--model: no/such/folder does not exist, and is no id of the Hugging Face Hub",
    "serve README.md": "--model: README.md is not a checkpoint folder (no config.json). Give the folder",
    "serve deploy": "--model: deploy is not a checkpoint folder (no config.json). Give the folder",
    "serve models/demo-eagle3": "is a draft head of demo-target, not a model; serve its target",
    "serve models/demo-target --prot 9000": "No such option: --prot (Possible options: --host, --port)",
    "serve models/demo-target --port 70000": "(env var: 'OUTRIDER_PORT'): Input should be less than or equal to",
    "serve models/demo-target --port abc": "'--port' (env var: 'OUTRIDER_PORT'): Input should be a valid integer",
    "serve models/demo-target --port {busy}": "stop the program that listens there, or give another port",
    "serve models/demo-target --host no.such.host.invalid": "is not an address of this machine",
    "serve models/demo-target --dtype int4": "--dtype: 'int4' is not one of auto, bfloat16",
    "serve models/demo-target --max-model-len 1M": "is above the 2048 positions of models/demo-target; give at most",
    "serve models/demo-target -tp 0": "'-tp': Input should be greater than or equal to 1",
    "serve models/demo-target -tp 64": "cannot share the 5 KV heads of models/demo-target; give at most 5",
    "serve models/demo-target -sc '{method: ngram}'": "--speculative-config is not JSON",
    """serve models/demo-target -sc '{"method": "ngrm"}'""": "method 'ngrm' is not one of auto, off,",
    """serve models/demo-target -sc '{"model": "./no/draft"}'""": "./no/draft does not exist",
    """serve models/demo-target -sc '{"method": "ngram", "num_speculative_tokens": -3}'""": "whole number from 1 to 32",
    "serve models/demo-target --quantization fp8": "leave the option out, or give a quantised checkpoint",
    "serve models/demo-target --enable-lora": "adapters are not loaded; merge them into the checkpoint",
    "serve models/demo-target --kv-cache-dtype fp4": "'fp4' is not one of auto, fp8",
    "serve models/demo-target --chat-template no.jinja": "no.jinja: No such file or directory; correct that setting",
    "serve models/demo-target --redis-url http://x": "start it, or correct --redis-url",
    "serve models/demo-target --redis-url redis://127.0.0.1:{nobody}/0": "start it, or correct --redis-url",
    "serve models/demo-target --api-key ''": "--api-key: a key is empty; give one, or leave the option out",
    "up --modle models/demo-target": "--model",
    "up --model nowhere": "--model: nowhere does not exist",
    "up --draft-model nowhere": "--draft-model: nowhere does not exist",
    "up --draft-model models/demo-hybrid-eagle3": "give a head that was trained for models/demo-target",
    "up --draft-model models/demo-draft,models/demo-draft": "it is given twice; name each --draft-model once",
    "up --drafters -1": "'--drafters': Input should be greater than or equal to 0",
    "demo --onse": "--once",
    "demo --port 99999": "'--port' (env var: 'OUTRIDER_PORT'): Input should be less than or equal to 65535",
    "down --force": "--force",
    "down --run-dir README.md": "README.md is a file; give the folder that `outrider up` was started with",
    "status --lives": "--live",
    "status --url http://127.0.0.1:{nobody}": "is a server running there? `outrider serve MODEL` starts one",
    "status --url nonsense": "it must begin with http:// or https://",
    "chat hi --method": "'--method' requires an argument",
    "chat hi --max-tokens 0": "'--max-tokens'",
    "chat hi --address nonsense": "--address: nonsense is not host:port",
    "chat hi --run-dir /nonexistent": "start one with `outrider up` or give --url",
    "chat hi --url http://127.0.0.1:{nobody}": "is a server running there? `outrider serve MODEL` starts one",
    "chat hi --address http://127.0.0.1:8000": "give --url http://127.0.0.1:8000",
    "complete x --temperature -1": "'--temperature'",
    "complete x --url x --address y:1": "give one of them",
    "complete": "Missing argument 'prompt'; `outrider complete --help` lists what there is",
    "complete hi --address 127.0.0.1:{nobody}": "a gateway's gRPC port is its HTTP port plus 1",
    "complete hi --max-tokens -1": "'--max-tokens': Input should be greater than or equal to 1",
    "complete hi --prediction no-file.txt --address 127.0.0.1:{nobody}": "no-file.txt: No such file or directory",
    "bench --num-prompts 0": "'--num-prompts'",
    "bench --request-rate 0": "'--request-rate'",
    "bench --percentile-metrics foo": "--percentile-metrics: foo is not one of ttft",
    "bench --metric-percentiles x": "--metric-percentiles: 'x' is not a list of numbers",
    "bench --dataset-name foo": "give them with --dataset-path",
    "bench --dataset-path no.jsonl --base-url http://127.0.0.1:9": "--dataset-path no.jsonl",
    "bench --base-url http://127.0.0.1:{nobody}": "is a server running there? `outrider serve MODEL` starts one",
    "doctor --prot 1": "--port",
    "doctor --device tpu": "--device must be auto, cpu or cuda, not tpu",
    "load-draft": "Missing argument 'path'",
    "load-draft x --run-dir /nonexistent": "start one with `outrider up` or give --verifiers",
    "load-draft x --verifiers 127.0.0.1:{nobody}": "no verifier answers there; give the gRPC addresses of verifiers",
    "load-draft x --drafters 127.0.0.1:{nobody}": "no drafter answers there; give the gRPC addresses of drafters",
    "reload": "Missing argument 'path'",
    "reload x --run-dir /nonexistent": "start one with `outrider up` or give --verifiers",
    "reload x --drain-s -1": "'--drain-s'",
    "reload x --verifiers 127.0.0.1:{nobody}": "no verifier answers there; give the gRPC addresses of verifiers",
    "key new": "Missing argument 'name'; `outrider key new --help` lists what there is",
    "certify": "Missing argument 'model'",
    "certify nowhere": "MODEL: nowhere does not exist",
    "certify models/demo-target --dtype int4": "'--dtype'",
    "certify models/demo-eagle3": "is a draft head of demo-target, not a model; give its target",
    "train fly": "No such command 'fly'",
    "train train": "Missing option '--method'",
    "train train --method e4 --target models/demo-target --data README.md --output x": "must be one of medusa",
    "train export --run nowhere --target models/demo-target --output x": "--run nowhere: there is no such folder",
    "train evaluate --draft-len 0": "--draft-len must be at least 1",
    "train prepare-data": "Missing option '--output'",
    "train prepare-data --output x --temperature 99": "--temperature must be within 0 and 10",
    "train auto": "Missing argument 'MODEL'",
    "train auto models/demo-target --prompts no.jsonl": "--prompts: no.jsonl does not exist",
    "train auto no/such/folder": "MODEL: no/such/folder does not exist, and is no id of the Hugging Face Hub",
    "train auto models/demo-target --hours 0": "--hours must be above 0, not 0",
    "audit": "the following arguments are required: url",
    "audit http://127.0.0.1:9 --nope": "unrecognized arguments: --nope",
    "audit http://127.0.0.1:{nobody}": "no answer: [Errno 111] Connection refused",
    "verify": "Missing argument 'file'",
    "verify no-file.json --model models/demo-target": "outrider: no-file.json: No such file or directory",
}


def test_the_lines_are_of_every_command() -> None:
    commands = set(typer.main.get_command(app).commands) - {"version", "drafter"}  # type: ignore[attr-defined]
    # A service's command says what is wrong in its log.
    assert {line.split()[0] for line in LINES} >= commands


@pytest.fixture(scope="module")
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.storm
@pytest.mark.parametrize("line", LINES)
def test_one_line_that_names_it(line: str, busy_port: int, tmp_path: Path) -> None:
    """And nothing is started."""
    words = shlex.split(line.replace("{busy}", str(busy_port)).replace("{nobody}", str(nobodys_port())))
    if words[0] in _STARTS:
        ports = () if "--port" in words else ("--port", str(server_port()))
        words += [*ports, "--grpc-port", str(server_port()), "--run-dir", str(tmp_path / "run")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OUTRIDER_", "OPENAI_"))}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [OUTRIDER, *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=200,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{cpu_s:.1f} s, exit code {done.returncode}: outrider {line}")
    steps = ("abilities ...",)  # what `audit` looks at
    [said] = [text for text in done.stderr.splitlines() if text and text not in steps]
    assert said.startswith(("outrider: ", "cannot audit "))  # the audit is a program of its own
    assert LINES[line] in said
    assert done.returncode in ((1, 2, 3) if "{nobody}" in line else (2,))
    assert not (tmp_path / "run").exists()
    assert cpu_s < MOST_S


@pytest.mark.parametrize("line", ["up --modle models/demo-target", "fly", "complete", "status --lives"])
def test_usage_errors_are_one_line(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same in this process, where it takes no time."""
    monkeypatch.setattr(sys, "argv", ["outrider", *line.split()])
    with pytest.raises(SystemExit) as ended:
        run_command(app, "outrider")
    [said] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert LINES[line] in said
    assert " --help` lists what there is" in said


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
