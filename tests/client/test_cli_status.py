"""`outrider status` against a real fleet."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from command import OUTRIDER, ROOT, Terminal, outrider

from outrider.client.cli.common import console
from outrider.client.cli.status import fleet_view
from outrider.client.fleet import Counts, rates
from outrider.client.metrics_text import sums
from outrider.client.stack.commands import StackState
from outrider.client.stack.processes import write_state
from tests.ports import nobodys_port


def test_once(stack: StackState, run_dir_of_stack: Path) -> None:
    shown = outrider("status", "--run-dir", str(run_dir_of_stack))
    assert shown.returncode == 0, shown.stderr
    for part in (stack.url, stack.verifiers[0], stack.drafters[0], "demo-target", "draft_model (demo-draft), ngram"):
        assert part in shown.stdout
    as_json = json.loads(outrider("status", "--run-dir", str(run_dir_of_stack), "--json").stdout)
    assert as_json["pids"] == stack.pids
    [verifier] = as_json["fleet"]["verifiers"]
    assert (verifier["address"], verifier["healthy"], verifier["model"]) == (stack.verifiers[0], True, "demo-target")


def test_a_process_that_is_down(stack: StackState, tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    state = replace(stack, pids={**stack.pids, "drafter-1": ended.pid}, num_restarts={"drafter-1": 3})
    write_state(tmp_path, state)
    shown = outrider("status", "--run-dir", str(tmp_path))
    assert shown.returncode == 1
    assert "DOWN   drafter-1\n" in shown.stdout
    assert "restarts  drafter-1 3\n" in shown.stdout
    assert stack.verifiers[0] in shown.stdout  # the fleet is shown all the same
    as_json = outrider("status", "--run-dir", str(tmp_path), "--json")
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout)["down"] == ["drafter-1"]


def test_any_gateway_by_its_url(stack: StackState, tmp_path: Path) -> None:
    shown = outrider("status", "--url", f"{stack.url}/v1", "--run-dir", str(tmp_path), "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["fleet"]["model"] == "demo-target"


@pytest.mark.parametrize(
    ("url", "exit_code", "words"),
    [("http://127.0.0.1:{free}", 1, "refused"), ("127.0.0.1:{free}", 2, "must begin with http")],
)
def test_no_gateway(url: str, exit_code: int, words: str) -> None:
    done = outrider("status", "--url", url.format(free=nobodys_port()))
    assert done.returncode == exit_code
    assert words in done.stderr


def test_live_as_json_counts_what_is_generated(stack: StackState) -> None:
    command = [OUTRIDER, "status", "--live", "--json", "--interval", "0.2", "--url", stack.url]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        json.loads(process.stdout.readline())
        done = outrider(
            "complete", "import os", "--max-tokens", "48", "--method", "off", "--address", stack.grpc_address
        )
        assert done.returncode == 0, done.stderr
        num_tokens = 0.0
        while num_tokens < 47.5:  # sums of rates times seconds; the test's time limit ends it
            rates_of_line = json.loads(process.stdout.readline())["rates"]
            num_tokens += rates_of_line["tokens_per_s"] * rates_of_line["seconds"]
        process.terminate()
    assert num_tokens == pytest.approx(48)


def test_live_in_a_terminal_ends_with_130(stack: StackState) -> None:
    with Terminal("status", "--live", "--interval", "0.1", "--url", stack.url) as terminal:
        terminal.read_until("tokens/s")
        terminal.type("\x03")
        assert terminal.exit_code() == 130
        assert "Traceback" not in terminal.seen


def test_rates() -> None:
    earlier = Counts(10.0, 100, 4, 0, 50, 20)
    found = rates(earlier, Counts(12.0, 180, 5, 1, 70, 30))
    assert (found.tokens_per_s, found.requests_per_s, found.failures_per_s) == (40.0, 0.5, 0.5)
    assert found.acceptance_rate == 0.5
    assert rates(earlier, Counts(11.0, 0, 0, 0, 0, 0)).tokens_per_s == 0  # the gateway was started anew
    assert rates(earlier, earlier).acceptance_rate is None
    assert rates(earlier, Counts(12.0, 180, 5, 1, 70, 30, saved_s=-3.5)).saved_s == -3.5


def test_metrics_text() -> None:
    text = '# TYPE a counter\na_total{m="x y"} 1.5\na_total{m="}"} 2\nb 1e3 1395066363000\nnot a sample\n<html>\n'
    assert sums(text) == {"a_total": 3.5, "b": 1000.0}


def test_a_warning_of_the_gateway_is_shown() -> None:
    fleet = {"version": "1", "verifiers": [], "drafters": [], "gateway": {"num_running": 0}, "warning": "nobody drafts"}
    with console.capture() as shown:
        console.print(fleet_view(fleet, None))
    assert "warning: nobody drafts" in shown.get()


def test_openai_base_url_names_the_gateway(stack: StackState, tmp_path: Path) -> None:
    """No stack runs from the folder."""
    environ = {"OPENAI_BASE_URL": f"{stack.url}/v1"}
    for command in (
        ("complete", "import os", "--max-tokens", "4", "--run-dir", str(tmp_path), "--json"),
        ("chat", "import os", "--max-tokens", "4", "--run-dir", str(tmp_path), "--json"),
        ("status", "--run-dir", str(tmp_path), "--json"),
        ("bench", "--num-prompts", "1", "--random-output-len", "4", "--run-dir", str(tmp_path), "--json"),
    ):
        done = outrider(*command, **environ)
        assert done.returncode == 0, (command, done.stderr)
        assert json.loads(done.stdout)


def test_openai_base_url_of_nobody() -> None:
    url = f"http://127.0.0.1:{nobodys_port()}/v1"
    done = outrider("complete", "import os", OPENAI_BASE_URL=url)
    assert done.returncode == 1
    assert url.removesuffix("/v1") in done.stderr
