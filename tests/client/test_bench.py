"""`outrider bench` against our gateway and against another OpenAI server, transformers' own; and its arithmetic."""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import OUTRIDER, ROOT, TIMEOUT_S, Terminal, another_gateway, outrider

from outrider.client.bench.acceptance import Acceptance
from outrider.client.bench.dataset import BenchPrompt, WordLength, read_prompts
from outrider.client.bench.figures import figures, percentile
from outrider.client.bench.report import error_lines, report_lines
from outrider.client.bench.request import RequestResult
from outrider.client.bench.run import CHAT_ENDPOINT, BenchRun, BenchSettings, arrival_times
from outrider.client.stack.commands import StackState
from outrider.shared.api_keys import key_line, new_key
from outrider.shared.errors import ConfigError
from tests.ports import nobodys_port, server_port

pytestmark = pytest.mark.storm

# The fields of OpenAI's own API that a benchmark needs: any server knows them.
OPENAI_FIELDS = {"model", "prompt", "messages", "max_tokens", "temperature", "stream", "stream_options"}


def test_our_server_with_drafts(stack: StackState, tmp_path: Path) -> None:
    saved = tmp_path / "figures.json"
    done = outrider(
        *("bench", "--base-url", stack.url, "--num-prompts", "6", "--max-concurrency", "3", "--ignore-eos"),
        *("--random-input-len", "48", "--random-output-len", "8", "--method", "ngram", "--num-speculative-tokens", "3"),
        *("--metric-percentiles", "90,99", "--result-filename", str(saved)),
    )
    assert done.returncode == 0, done.stderr
    lines = {line.partition(":")[0]: line.partition(":")[2].strip() for line in done.stdout.splitlines()}
    assert (lines["Successful requests"], lines["Failed requests"]) == ("6", "0")
    assert lines["Total generated tokens"] == str(6 * 8)
    for label in ("Mean TTFT (ms)", "Median TPOT (ms)", "P90 ITL (ms)", "P99 ITL (ms)", "Request throughput (req/s)"):
        assert float(lines[label]) > 0
    found = json.loads(saved.read_text())
    assert 0.8 * 6 * 48 < found["total_input_tokens"] < 1.2 * 6 * 48
    drafts, drafted = found["spec_decode_num_drafts"], found["spec_decode_draft_tokens"]
    assert drafts <= drafted <= 3 * drafts
    assert lines["Draft tokens"] == str(drafted)
    assert "api_key" not in found


def test_a_file_of_chats_with_a_request_that_fails(stack: StackState, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
        {"prompt": "hello", "output_tokens": 5},
        {"prompt": "word " * 4000},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = outrider(
        *("bench", "--base-url", f"{stack.url}/v1", "--endpoint", CHAT_ENDPOINT, "--dataset-path", str(path)),
        *("--num-prompts", "3", "--request-rate", "50", "--ignore-eos", "--json"),
    )
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (2, 1, 3 + 5)
    [error] = found["errors"]
    assert error["count"] == 1
    assert "2048" in error["message"]  # the model's context
    assert error["message"] in done.stderr


def test_ctrl_c_in_a_terminal(stack: StackState) -> None:
    command = ("bench", "--base-url", stack.url, "--num-prompts", "50", "--max-concurrency", "1")
    with Terminal(*command) as terminal:
        terminal.read_until("/50")  # the progress bar
        terminal.type("\x03")
        assert terminal.exit_code() == 130, terminal.seen
        assert "Traceback" not in terminal.seen


def test_no_server() -> None:
    url = f"http://127.0.0.1:{nobodys_port()}"
    done = outrider("bench", "--base-url", url, "--model", "m")
    assert done.returncode == 1
    assert done.stderr.startswith(f"outrider: the warm-up request failed: {url}: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--percentile-metrics", "ttft,speed"), "speed is not one of ttft, tpot, itl, e2el"),
        (("--metric-percentiles", "99,101"), "--metric-percentiles"),
        (("--dataset-path", "/no/such/file"), "/no/such/file"),
        (("--base-url", "localhost:8000"), "http://"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], words: str) -> None:
    done = outrider("bench", "--base-url", "http://127.0.0.1:1", "--model", "m", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


@pytest.fixture(scope="module")
def other_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URL and model name of transformers' own OpenAI server, offline, on one thread."""
    model, port = str(ROOT / "models" / "demo-draft"), server_port()
    cache = tmp_path_factory.mktemp("hub")  # it lists what is in there
    environ = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log_path = cache / "log"
    command = [str(Path(sys.executable).with_name("transformers")), "serve", model, "--port", str(port)]
    with log_path.open("wb") as log_file:
        process = subprocess.Popen([*command, "--device", "cpu"], env=environ, stdout=log_file, stderr=log_file)
    try:
        deadline = time.monotonic() + 240
        while not _listens(port):
            assert process.poll() is None, log_path.read_text()
            assert time.monotonic() < deadline, log_path.read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", model
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("endpoint", ["/v1/completions", CHAT_ENDPOINT])
def test_another_openai_server(other_server: tuple[str, str], endpoint: str) -> None:
    url, model = other_server
    done = outrider(
        *("bench", "--base-url", url, "--model", model, "--endpoint", endpoint, "--num-prompts", "3"),
        *("--random-input-len", "24", "--random-output-len", "4", "--max-concurrency", "2", "--json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["completed"], found["failed"], found["without_usage"]) == (3, 0, 0)
    assert 0 < found["total_output_tokens"] <= 3 * 4
    assert 0.7 * 3 * 24 < found["total_input_tokens"] < 1.3 * 3 * 24
    assert found["mean_ttft_ms"] > 0
    assert not any(name.startswith("spec_decode") for name in found)


@pytest.mark.parametrize("endpoint", ["/v1/completions", CHAT_ENDPOINT])
def test_nothing_of_outriders_own_is_sent_unasked(endpoint: str) -> None:
    body = BenchSettings("http://x", "m", endpoint=endpoint).body(BenchPrompt("hello"))
    assert body.keys() <= OPENAI_FIELDS
    asked = BenchSettings("http://x", "m", num_speculative_tokens=4).body(BenchPrompt("hello"))
    assert asked["speculation"] == {"method": "auto", "num_speculative_tokens": 4}


def test_the_key_is_sent_and_not_shown(stack: StackState, tmp_path: Path) -> None:
    key = new_key()
    key_file = tmp_path / "keys"
    key_file.write_text(key_line("alice", key, 0, 0) + "\n")
    with another_gateway(stack, "--api-keys-file", str(key_file), model=ROOT / "models" / "demo-target") as (url, _):
        command = ("bench", "--base-url", url, "--num-prompts", "2", "--random-output-len", "2", "--json")
        refused = outrider(*command)
        done = outrider(*command, OPENAI_API_KEY=key)
    assert refused.returncode == 1
    assert "API key" in refused.stderr
    assert done.returncode == 0, done.stderr
    assert key not in done.stdout + done.stderr


def result(first_token_s: float, seconds: float, num_output_tokens: int, gaps_s: list[float]) -> RequestResult:
    return RequestResult(10, num_output_tokens, first_token_s, seconds, gaps_s)


def test_figures_against_numpy_and_the_definitions() -> None:
    done = [result(0.1, 0.5, 5, [0.1, 0.3]), result(0.2, 0.2, 1, []), result(0.4, 1.0, 4, [0.2, 0.2, 0.2])]
    failed = [RequestResult(error="HTTP 500"), RequestResult(error="HTTP 500"), RequestResult(error="no")]
    found = figures(BenchRun((*done, *failed), 2.0, Acceptance(4, 12, 6)), [50, 90, 99.9])
    assert (found["completed"], found["failed"]) == (3, 3)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 10)
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (1.5, 5, 20)
    expected = {"ttft": [100, 200, 400], "tpot": [100, 200], "itl": [100, 300, 200, 200, 200], "e2el": [500, 200, 1000]}
    for metric, values in expected.items():
        assert found[f"mean_{metric}_ms"] == pytest.approx(np.mean(values))
        assert found[f"median_{metric}_ms"] == pytest.approx(np.median(values))
        assert found[f"std_{metric}_ms"] == pytest.approx(np.std(values))
        for percent in (50, 90, 99.9):
            assert found[f"p{percent:g}_{metric}_ms"] == pytest.approx(np.percentile(values, percent))
    assert found["spec_decode_acceptance_rate"] == 50
    assert found["spec_decode_acceptance_length"] == 1 + 6 / 4
    assert list(error_lines(found)) == ["2 x HTTP 500", "1 x no"]


def test_percentile_is_numpys() -> None:
    values = [random.Random(3).random() for _ in range(37)]
    for percent in (0, 1, 12.5, 50, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert percentile([], 50) == 0


def test_report_says_when_tokens_are_counted_as_updates() -> None:
    without_usage = RequestResult(None, 3, 0.1, 0.3, [0.1, 0.1])
    found = figures(BenchRun((without_usage,), 1.0, None), [99]) | {"max_concurrency": 0, "request_rate": "inf"}
    text = "\n".join(report_lines(found, ["ttft"], [99]))
    assert "no usage with 1 answers" in text
    assert "Speculative" not in text


def test_arrivals_are_a_poisson_process() -> None:
    assert arrival_times(3, float("inf"), random.Random(0)) == [0, 0, 0]
    times = arrival_times(20_001, 4.0, random.Random(0))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    # Of an exponential law mean and standard deviation are 1 / rate; 20,000 draws bring both to a percent or two.
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.05)
    assert times == arrival_times(20_001, 4.0, random.Random(0))


def test_word_length_is_the_line_through_two_prompts() -> None:
    fitted = WordLength.fit((16, 16 * 3 + 7), (64, 64 * 3 + 7))
    assert (fitted.tokens_per_word, fitted.extra_tokens) == (3, 7)
    assert fitted.num_words(307) == 100
    assert fitted.num_words(1) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no prompt"),
        ("{}", "prompts:1"),
        ('{"prompt": "a"}\n{"prompt": 3}', "prompts:2"),
        ("not json", "not JSON"),
        ('{"prompt": "a", "max_tokens": "many"}', "max_tokens"),
        ('{"messages": []}', "prompts:1"),
    ],
)
def test_a_wrong_dataset(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "prompts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_prompts(path, is_chat=False)


def test_help_has_examples() -> None:
    done = subprocess.run([OUTRIDER, "bench", "--help"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert "Examples:" in done.stdout
