"""The `outrider` command as users run it: a process, its output, its exit code."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from command import OUTRIDER, ROOT, TIMEOUT_S, Terminal
from command import outrider as run
from typer.testing import CliRunner

from outrider.client.cli.app import app
from outrider.client.cli.demo import CHAT, CHAT_MODEL, TINY, Show
from tests.ports import nobodys_port, server_port

# A test starts up to sixteen commands and a stack: each has TIMEOUT_S.
pytestmark = pytest.mark.timeout(900)


def free_ports() -> tuple[str, str]:
    return str(server_port()), str(server_port())


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run folder; whatever still runs from it at the end of the test is stopped."""
    folder = tmp_path / "run"
    yield folder
    run("down", "--run-dir", str(folder))


COMMANDS = ("up", "serve", "down", "status", "complete", "chat", "bench", "doctor", "demo", "certify", "key new")
WITHOUT_JSON = ("serve", "demo")  # they stay, and what they print is no result


def test_help_names_every_command_and_the_exit_codes() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in (*COMMANDS[:-1], "train", "version", "key"):
        assert f"\n  {command} " in done.stdout
    assert "Exit codes: 0 done, 1 failed, 2 wrong usage or setting, 130 interrupted" in " ".join(done.stdout.split())
    assert "Examples:" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_an_example_and_json(command: str) -> None:
    if command == "certify":  # another program takes the process over
        done = run(command, "--help")
        exit_code, shown = done.returncode, done.stdout
    else:
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command.split(), "--help"], prog_name="outrider")
        exit_code, shown = result.exit_code, result.stdout
    assert exit_code == 0
    assert "Example" in shown
    assert f"outrider {command}" in shown
    assert ("--json" in shown) == (command not in WITHOUT_JSON)


@cache
def bash_completion() -> str:
    return run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1").stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("outrider b", "bench"),
        (
            "outrider ",
            "up serve down status complete chat bench doctor demo load-draft reload drafter "
            "audit certify verify train key version",
        ),
        ("outrider key ", "new"),
        ("outrider bench --request", "--request-rate"),
    ],
)
def test_bash_completes(words: str, found: str) -> None:
    """bash's own machinery: the function that --install-completion installs, and the candidates that it finds."""
    shown = bash_completion()
    assert "complete -o default -F _outrider_completion outrider" in shown
    script = (
        f"{shown}\nread -ra COMP_WORDS <<< '{words}'; [[ '{words}' == *' ' ]] && COMP_WORDS+=('')\n"
        f"COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _outrider_completion '{OUTRIDER}'; echo \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert sorted(done.stdout.split()) == sorted(found.split()), done.stderr


def test_install_completion_writes_what_bash_reads(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = run("--install-completion", "bash", **environ)
    assert done.returncode == 0, done.stderr
    installed = tmp_path / ".bash_completions" / "outrider.sh"
    assert "_outrider_completion" in installed.read_text()
    assert str(installed) in (tmp_path / ".bashrc").read_text()


def test_ctrl_c_while_starting_stops_what_was_started(run_dir: Path) -> None:
    port, grpc_port = free_ports()
    with Terminal("up", "--run-dir", str(run_dir), "--port", port, "--grpc-port", grpc_port) as terminal:
        terminal.read_until("loading the target")
        terminal.type("\x03")
        assert terminal.exit_code() == 130
        assert "verifier stopped" in terminal.seen
        assert "Traceback" not in terminal.seen
    assert not (run_dir / "stack.json").exists()


@pytest.mark.parametrize("module", ["grpc", "typer", "httpx", "outrider.client.cli.app"])
def test_ctrl_c_while_it_is_being_imported(module: str) -> None:
    """The interrupt comes with an import, so that it surely falls into the first moments."""
    code = f"""
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from outrider.client.cli.main import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_ctrl_c_in_certify() -> None:
    with Terminal("certify", "models/demo-target") as terminal:
        terminal.read_until("loading and certifying")
        terminal.type("\x03")
        assert terminal.exit_code() == 130
        assert "Traceback" not in terminal.seen


def test_version() -> None:
    done = run("version")
    assert done.returncode == 0
    assert done.stdout.strip()[0].isdigit()
    assert json.loads(run("version", "--json").stdout) == {"version": done.stdout.strip()}
    assert run("--version").stdout == done.stdout


def test_wrong_usage_is_exit_code_2() -> None:
    assert run().returncode == 2
    assert run("fly").returncode == 2
    done = run("complete", "import os", "--max-tokens", "0")
    assert done.returncode == 2
    assert "--max-tokens" in done.stderr


@pytest.mark.parametrize("option", ["--model", "--draft-model"])
def test_a_wrong_model_folder(run_dir: Path, option: str) -> None:
    port, grpc_port = free_ports()
    folders = ("--run-dir", str(run_dir), option, "/no/such/folder")
    done = run("up", "--detach", *folders, "--port", port, "--grpc-port", grpc_port)
    assert done.returncode == 2
    assert f"{option}: /no/such/folder does not exist" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stdout + done.stderr
    assert not (run_dir / "stack.json").exists()


def test_the_demo_outside_of_the_repository(run_dir: Path, tmp_path: Path) -> None:
    done = run("demo", "--run-dir", str(run_dir), cwd=tmp_path)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert "--model: there is no folder models/demo-target here; the demo models are in the source repository" in said


def test_a_wrong_speculative_config(run_dir: Path) -> None:
    port, grpc_port = free_ports()
    done = run(
        *("up", "--detach", "--run-dir", str(run_dir), "--port", port, "--grpc-port", grpc_port),
        *("--draft-model", "", "--speculative-config", '{"metod": "ngram"}'),
    )
    assert done.returncode == 2
    assert "metod" in done.stderr
    assert "loading" not in done.stdout + done.stderr, "it is refused before anything is loaded"
    assert not (run_dir / "stack.json").exists()


def test_nothing_runs(run_dir: Path) -> None:
    folder = ("--run-dir", str(run_dir))
    status = run("status", *folder)
    assert (status.returncode, status.stdout.strip()) == (1, "no stack is running")
    as_json = run("status", "--json", *folder)
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout) == {}
    down = run("down", *folder)
    assert (down.returncode, down.stdout.strip()) == (0, "no stack is running")
    done = run("complete", "import os", *folder)
    assert done.returncode == 2
    assert "outrider up" in done.stderr


def test_no_gateway_at_the_address() -> None:
    done = run("complete", "import os", "--address", f"127.0.0.1:{nobodys_port()}")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("outrider: ")


def test_up_status_complete_down(run_dir: Path) -> None:
    port, grpc_port = free_ports()
    folder = ("--run-dir", str(run_dir))
    up = run("up", "--detach", "--json", *folder, "--port", port, "--grpc-port", grpc_port)
    assert up.returncode == 0, up.stdout + up.stderr
    assert json.loads(up.stdout)["url"] == f"http://127.0.0.1:{port}"
    assert "loading the target" in up.stderr
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=30) as reply:
        assert json.load(reply) == {"ready": True}

    status = run("status", "--json", *folder)
    assert status.returncode == 0
    state = json.loads(status.stdout)
    assert state["url"] == f"http://127.0.0.1:{port}"
    assert state["grpc_address"] == f"127.0.0.1:{grpc_port}"
    assert set(state["pids"]) == {"redis", "verifier", "gateway", "supervisor"}

    again = run("up", "--detach", *folder, "--port", port, "--grpc-port", grpc_port)
    assert again.returncode == 2
    assert "already running" in again.stderr

    outputs = {method: _complete(folder, method) for method in ("off", "ngram", "draft_model")}
    assert len(set(outputs.values())) == 1
    assert outputs["off"].strip()
    as_json = json.loads(run("complete", "def add(a, b):", *folder, "--max-tokens", "24", "--json").stdout)
    assert as_json["text"] == outputs["off"]
    assert "".join(token["text"] for token in as_json["tokens"]) == as_json["text"]
    assert (as_json["completion_tokens"], as_json["finish_reason"]) == (24, "length")
    unknown = run("complete", "import os", *folder, "--method", "crystal_ball")
    assert unknown.returncode == 2
    assert "crystal_ball" in unknown.stderr

    down = run("down", "--json", *folder)
    assert down.returncode == 0
    assert json.loads(down.stdout) == {"stopped": True}
    assert "gateway stopped" in down.stderr
    assert all(is_gone(pid) for pid in state["pids"].values())
    assert run("status", *folder).returncode == 1


def _complete(folder: tuple[str, str], method: str) -> str:
    """The completion's text: what stands between the legend and the figures."""
    done = run("complete", "def add(a, b):", *folder, "--method", method, "--max-tokens", "24")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "accepted draft" in lines[0]
    assert "tokens/s" in lines[-1]
    return "\n".join(lines[1:-1])


def test_demo_once_without_the_chat_model(run_dir: Path, tmp_path: Path) -> None:
    """In a folder that `make demo` was never run in."""
    (tmp_path / "models").symlink_to(ROOT / "models")
    port, grpc_port = free_ports()
    folder = ("--run-dir", str(run_dir))
    done = run("demo", "--once", *folder, "--port", port, "--grpc-port", grpc_port, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{CHAT_MODEL} is not there (`make demo` gets it from the package index)" in " ".join(done.stdout.split())
    assert "def read_lines(path):" in done.stdout
    check_demo(TINY, done.stdout)
    assert f"Open http://127.0.0.1:{port}  (" in done.stdout
    assert not (run_dir / "stack.json").exists()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(port))) != 0


@pytest.mark.storm
@pytest.mark.skipif(not (ROOT / CHAT_MODEL).is_file(), reason=f"no {CHAT_MODEL}: `make demo` gets it")
def test_the_demo_answers_questions(run_dir: Path) -> None:
    port, grpc_port = free_ports()
    done = run("demo", "--once", "--run-dir", str(run_dir), "--port", port, "--grpc-port", grpc_port)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "light" in done.stdout.partition(CHAT.questions[-1].text)[2].lower(), "an answer about rainbows"
    check_demo(CHAT, done.stdout)


def check_demo(show: Show, shown: str) -> None:
    for question in show.questions:
        line = (
            rf"^{question.kind}: \d+ tokens/s with speculation, \d+ without: (\d+\.\d times as fast|speculation hardly"
        )
        assert re.search(rf"{line} helps here), same \d+ bytes$", shown, re.MULTILINE), shown


def wait_for_state(run_dir: Path, process: subprocess.Popen[str]) -> dict[str, int]:
    """Process ids of the stack, as soon as stack.json has them."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (run_dir / "stack.json").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    pids: dict[str, int] = json.loads((run_dir / "stack.json").read_text())["pids"]
    return pids


def test_sigterm_stops_the_stack(run_dir: Path) -> None:
    port, grpc_port = free_ports()
    command = [OUTRIDER, "up", "--run-dir", str(run_dir), "--port", port, "--grpc-port", grpc_port]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        pids = wait_for_state(run_dir, process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    assert "gateway stopped" in output
    assert all(is_gone(pid) for pid in pids.values())


@pytest.mark.storm
def test_sigterm_while_the_addresses_are_being_shown_stops_the_stack(run_dir: Path) -> None:
    """Held there by a pipe that is full, its progress going elsewhere."""
    port, grpc_port = free_ports()
    command = [OUTRIDER, "up", "--json", "--run-dir", str(run_dir), "--port", port, "--grpc-port", grpc_port]
    read_end, write_end = os.pipe()
    os.write(write_end, b" " * fcntl.fcntl(write_end, fcntl.F_GETPIPE_SZ))
    with subprocess.Popen(command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True) as process:
        os.close(write_end)
        pids = wait_for_state(run_dir, process)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        with open(read_end, "rb") as shown:
            shown.read()
        _, progress = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, progress
    assert "gateway stopped" in progress
    assert all(is_gone(pid) for pid in pids.values())
