"""`prepare-data` and `evaluate` against a real stack: rows are what was generated, and acceptance is measured.

The target drafts for itself, so the right figure is known: every greedy draft token is accepted.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from outrider.client.stack.commands import StackSettings
from outrider.client.stack.processes import Stack
from outrider.training.evaluate_heads import Cell
from tests.ports import server_port

pytestmark = pytest.mark.storm
TARGET = Path(__file__).parents[2] / "models" / "demo-target"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = StackSettings(
        model=str(TARGET), draft_model=str(TARGET), methods=("draft_model", "ngram"), port=0, grpc_port=server_port()
    )
    stack = Stack(settings, tmp_path_factory.mktemp("stack"), lambda _message: None)
    state = stack.start()
    try:
        yield f"{state.url}/v1"
    finally:
        stack.stop()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A training and a held-out split of a few documents."""
    documents = [f"import os\n\n\ndef read_{name}(path):\n" + "    x = 1\n" * 60 for name in ("a", "b", "c")]
    chats = [f"<|user|>\nWrite a function `{name}` that adds<|end|>\n<|assistant|>\n" for name in ("f", "g")]
    for split in ("train", "heldout"):
        text = "".join(json.dumps(document) + "\n" for document in documents + chats)
        (tmp_path / f"{split}.jsonl").write_text(text)
    return tmp_path


def command(name: str, url: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "outrider.training", name, "--base-url", url, *more]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prepared_data_is_what_was_generated_and_survives_ctrl_c(url: str, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "data.jsonl"
    prepare = command("prepare-data", url, "--corpus", str(corpus), "--output", str(out), "--samples", "24")
    prepare += ["--max-tokens", "64", "--concurrency", "2"]
    process = subprocess.Popen(prepare, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not out.exists() or out.read_bytes().count(b"\n") < 5:
        assert process.poll() is None, "all was done before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "repeat the command to continue from here" in stderr
    num_before = len(rows_of(out))
    assert num_before >= 5
    again = subprocess.run(prepare, capture_output=True, text=True, timeout=240, check=True)
    assert f"{125 - num_before} written, {num_before} already present, 0 refused" in again.stdout.replace("\n", " ")
    told = subprocess.run([*prepare, "--json"], capture_output=True, text=True, timeout=240, check=True)
    counts = {"num_written": 0, "num_skipped": 125, "num_refused": 0, "problems": []}
    assert json.loads(told.stdout) == {"output": str(out), **counts}
    assert "125 of 125 are already present" in " ".join(told.stderr.split())
    rows = rows_of(out)
    # Five documents, each greedy once and 24 times at temperature 1.
    assert len({row["id"] for row in rows}) == len(rows) == 125
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    for row in rows:
        assert row["completion"] == tokenizer.decode(row["token_ids"])
        prompt = tokenizer.decode(row["prompt_token_ids"], skip_special_tokens=False)
        assert prompt == row["prompt"] if "prompt" in row else row["messages"][0]["content"] in prompt
    greedy = next(row for row in rows if row["temperature"] == 0 and "prompt" in row)
    body = {"prompt": greedy["prompt"], "max_tokens": 64, "temperature": 0, "return_token_ids": True}
    direct = httpx.post(f"{url}/completions", json=body, timeout=120).json()
    assert direct["choices"][0]["token_ids"] == greedy["token_ids"]


def test_acceptance_through_the_gateway(url: str, corpus: Path, tmp_path: Path) -> None:
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.svg"
    evaluate = command("evaluate", url, "--corpus", str(corpus), "--output", str(figures), "--plot", str(plot))
    evaluate += ["--method", "draft_model", "--method", "ngram", "--draft-len", "4", "--tree", "6"]
    evaluate += ["--domain", "code", "--domain", "chat", "--num-prompts", "2", "--max-tokens", "48"]
    outcome = subprocess.run(evaluate, capture_output=True, text=True, timeout=290, check=True)
    assert "tokens per step of the target" in outcome.stdout
    content = json.loads(figures.read_text())
    cells = {
        (cell["method"], cell["draft_len"], cell["temperature"], cell["domain"]): cell for cell in content["cells"]
    }
    assert len(cells) == 2 * 2 * 2 * 2
    for (method, draft_len, temperature, _), cell in cells.items():
        steps, histogram = cell["num_spec_steps"], cell["acceptance_histogram"]
        assert cell["num_requests"] == 2
        assert sum(histogram) == steps
        assert sum(index * count for index, count in enumerate(histogram)) == cell["num_accepted_draft_tokens"]
        assert len(histogram) <= draft_len + 1
        assert cell["token_tree"] == (draft_len == 6)
        if method == "draft_model" and temperature == 0 and not cell["token_tree"]:
            # The last step of a request may be cut short by max_tokens or a stop.
            assert steps > 0
            assert draft_len + 1 - 0.75 < cell["mean_acceptance_length"] <= draft_len + 1
        assert cell["mean_acceptance_length"] == pytest.approx(
            1 + cell["num_accepted_draft_tokens"] / steps if steps else 0, abs=1e-3
        )
    few = command("evaluate", url, "--corpus", str(corpus), "--output", str(figures), "--method", "ngram", "--json")
    few += ["--draft-len", "2", "--temperature", "0", "--domain", "code", "--num-prompts", "1", "--max-tokens", "8"]
    told = subprocess.run(few, capture_output=True, text=True, timeout=290, check=True)
    assert json.loads(told.stdout) == json.loads(figures.read_text())
    assert "requests 1/1" in told.stderr
    svg = plot.read_text()
    assert svg.lstrip().startswith("<?xml")
    assert svg.count("draft_model") >= 1


def test_a_method_that_is_not_served_is_refused_in_the_gateways_words(url: str, corpus: Path) -> None:
    refused = command("evaluate", url, "--corpus", str(corpus), "--method", "medusa", "--domain", "code")
    outcome = subprocess.run(refused, capture_output=True, text=True, timeout=280, check=False)
    assert outcome.returncode == 1
    assert "'medusa' is not one of auto, off" in outcome.stderr


def test_figures_of_a_cell() -> None:
    cell = Cell("m", 3, False, 0.0, "code", 1, 20, num_spec_steps=10, num_draft_tokens=30, num_accepted_draft_tokens=11,
                acceptance_histogram=(4, 3, 1, 2))  # fmt: skip
    assert cell.mean_acceptance_length == pytest.approx(2.1)
    assert cell.acceptance_by_position == (0.6, 0.3, 0.2)
    nothing = Cell("m", 3, False, 0.0, "code", 1, 20, 0, 0, 0, ())
    assert (nothing.mean_acceptance_length, nothing.acceptance_by_position) == (0.0, ())


def test_the_model_writes_the_prompts_too(url: str, tmp_path: Path) -> None:
    """It goes on behind its user header as it does there, and its answers are to what it wrote."""
    out = tmp_path / "data.jsonl"
    prepare = command("prepare-data", url, "--sample-prompts", "--num-prompts", "6", "--output", str(out))
    subprocess.run([*prepare, "--temperature", "0", "--max-tokens", "8"], capture_output=True, timeout=240, check=True)
    turns, rows = rows_of(out.with_suffix(".turns.jsonl")), rows_of(out)
    assert len(turns) == 6
    body = {"prompt": "<|user|>\n", "max_tokens": 128, "temperature": 0.9, "seed": turns[0]["seed"]}
    direct = httpx.post(f"{url}/completions", json=body, timeout=120).json()
    assert direct["choices"][0]["text"] == turns[0]["completion"]
    written = {turn["completion"].strip() for turn in turns if turn["finish_reason"] == "stop"} - {""}
    assert written
    assert {row["messages"][0]["content"] for row in rows} == written
