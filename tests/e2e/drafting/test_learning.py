"""`outrider up --learn shared` on a head that was damaged: it learns from what it serves, and no answer changes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_stack import MODELS

from outrider.drafting.checkpoints.recognise import recognise
from tests.ports import server_port
from tests.verifier_service.drafting.other_weights import with_noise

pytestmark = pytest.mark.storm

OUTRIDER = str(Path(sys.executable).with_name("outrider"))
BEGINNINGS = ("def add", "import os", "class Tree:", "for name in", "if not", "return [", "with open(", "print(")


def outrider(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    command = [OUTRIDER, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=environment)


def answer(url: str, number: int, **changes: Any) -> str:
    prompt = f"{BEGINNINGS[number % len(BEGINNINGS)]} # {number}"
    body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "speculation": {"method": "eagle3"}, **changes}
    return str(httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status().json()["choices"][0])


def learning_of(*run_dir: str) -> dict[str, Any]:
    fleet = json.loads(outrider("status", "--json", *run_dir).stdout)["fleet"]
    learning: dict[str, Any] = fleet["verifiers"][0]["learning"]
    return learning


def learner_pid() -> int:
    found = subprocess.run(["pgrep", "-f", "outrider.training.learner"], capture_output=True, text=True, check=True)
    return int(found.stdout.split()[-1])


@pytest.mark.timeout(600)
def test_a_damaged_head_is_mended_by_what_it_serves(tmp_path: Path) -> None:
    head, versions = with_noise(MODELS / "demo-eagle3", tmp_path / "damaged", 0.6), tmp_path / "versions"
    port, run_dir = server_port(), ("--run-dir", str(tmp_path / "run"))
    options = ("--learn", "shared", "--learn-share", "1.0", "--learn-checkpoints", str(versions), *run_dir)
    up = outrider(
        *("up", "--detach", "--draft-model", str(head), "--port", str(port), *options),
        OUTRIDER_LEARN_CYCLE_TOKENS="4000",
    )
    assert up.returncode == 0, up.stderr
    try:
        url = f"http://127.0.0.1:{port}"
        expected = [answer(url, number, speculation={"method": "off"}) for number in range(4)]
        deadline, number = time.monotonic() + 400, 0
        with ThreadPoolExecutor(4) as threads:
            while (learning := learning_of(*run_dir))["num_taken"] == 0:
                assert time.monotonic() < deadline, learning
                list(threads.map(lambda each: answer(url, each), range(number, number + 16)))
                number += 16
        assert learning["tokens_after"] > learning["tokens_before"]
        assert learning["num_tokens"] >= 4000
        assert [answer(url, number) for number in range(4)] == expected
        kept = sorted(versions.iterdir())
        assert kept
        assert recognise(kept[-1]) == "eagle3"
        assert not [path for path in kept[-1].iterdir() if path.suffix not in (".json", ".safetensors")]
        os.kill(learner_pid(), signal.SIGKILL)
        assert [answer(url, number) for number in range(4)] == expected
        answer(url, 5, cache_salt="mine")
        answer(url, 6, speculation={"method": "eagle3", "learn": False})
        deadline = time.monotonic() + 30
        while learning_of(*run_dir)["num_private_tokens"] < 80:
            assert time.monotonic() < deadline
        assert "has learned from" in outrider("status", *run_dir).stdout
    finally:
        outrider("down", *run_dir)


def test_what_cannot_learn_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run_dir = ("--run-dir", str(tmp_path / "run"))
    for words, message in (
        (("--draft-model", str(MODELS / "demo-draft")), "needs one head that can be trained further"),
        (("--draft-model", ""), "needs one head that can be trained further"),
        (("--draft-model", str(MODELS / "demo-eagle3"), "--allow-draft-loading"), "--allow-draft-loading"),
    ):
        up = outrider("up", "--detach", "--learn", "shared", *words, *run_dir)
        assert up.returncode == 2, up.stderr
        assert message in up.stderr
        assert not (tmp_path / "run" / "stack.json").exists()
