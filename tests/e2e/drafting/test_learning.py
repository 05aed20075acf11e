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
from tests.ports import stack_ports
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


def learner_pid(run_dir: Path) -> int:
    """Of the stack in the folder: others may run beside."""
    verifier = str(json.loads((run_dir / "stack.json").read_text())["pids"]["verifier"])
    command = ["pgrep", "-P", verifier, "-f", "outrider.training.learner"]
    [pid] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(pid)


@pytest.mark.timeout(600)
def test_a_damaged_head_is_mended_by_what_it_serves(tmp_path: Path) -> None:
    head, versions = with_noise(MODELS / "demo-eagle3", tmp_path / "damaged", 0.6), tmp_path / "versions"
    (port, ports), run_dir = stack_ports(), ("--run-dir", str(tmp_path / "run"))
    options = ("--learn", "shared", "--learn-share", "1.0", "--learn-checkpoints", str(versions), *run_dir)
    up = outrider(
        *("up", "--detach", "--draft-model", str(head), *ports, *options),
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
        os.kill(learner_pid(tmp_path / "run"), signal.SIGKILL)
        assert [answer(url, number) for number in range(4)] == expected
        answer(url, 5, cache_salt="mine")
        answer(url, 6, speculation={"method": "eagle3", "learn": False})
        deadline = time.monotonic() + 30
        while learning_of(*run_dir)["num_private_tokens"] < 80:
            assert time.monotonic() < deadline
        assert "has learned from" in outrider("status", *run_dir).stdout
    finally:
        outrider("down", *run_dir)


@pytest.mark.timeout(900)
def test_each_salt_mends_the_head_for_itself(tmp_path: Path) -> None:
    """Two tenants, and requests without a salt, whose head stays damaged; every answer is as without drafts."""
    head, salts = with_noise(MODELS / "demo-eagle3", tmp_path / "damaged", 0.6), ("salt-of-alpha", "salt-of-beta")
    (port, ports), run_dir = stack_ports(), ("--run-dir", str(tmp_path / "run"))
    options = ("--learn", "per-salt", "--learn-share", "1.0", *run_dir)
    up = outrider(
        *("up", "--detach", "--draft-model", str(head), *ports, *options),
        OUTRIDER_LEARN_CYCLE_TOKENS="3000",
    )
    assert up.returncode == 0, up.stderr
    try:
        url = f"http://127.0.0.1:{port}"
        expected = [answer(url, number, speculation={"method": "off"}) for number in range(4)]
        deadline, number = time.monotonic() + 700, 0

        def ask(each: int) -> None:
            answer(url, each, cache_salt=salts[each % 2], max_tokens=40)

        def learning() -> dict[str, Any]:
            fleet = httpx.get(f"{url}/fleet", timeout=30).raise_for_status().json()
            return dict(fleet["verifiers"][0]["learning"])

        with ThreadPoolExecutor(4) as threads:
            while learning()["num_salt_heads"] < 2:
                assert time.monotonic() < deadline, learning()
                list(threads.map(ask, range(number, number + 32)))
                number += 32
        assert learning()["num_salts"] == 2
        assert learning()["num_taken"] >= 2
        for changes in ({}, *({"cache_salt": salt} for salt in salts)):
            assert [answer(url, number, **changes) for number in range(4)] == expected
        os.kill(learner_pid(tmp_path / "run"), signal.SIGKILL)
        assert [answer(url, number, cache_salt=salts[0]) for number in range(4)] == expected
        assert learning()["num_salt_heads"] == 2
        status = " ".join(outrider("status", *run_dir).stdout.split())
        assert "2 salts learned from apart, 2 with a head of their own" in status
        said = [status, json.dumps(learning()), httpx.get(f"{url}/metrics", timeout=30).text]
        said += [path.read_text() for path in (tmp_path / "run").glob("*.log")]
        assert not [salt for salt in salts for text in said if salt in text]
    finally:
        outrider("down", *run_dir)


def test_what_cannot_learn_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run_dir = ("--run-dir", str(tmp_path / "run"))
    for words, message in (
        (("--draft-model", str(MODELS / "demo-eagle3"), "--learn", "per-salt", "--learn-checkpoints", "v"), "per-salt"),
        (("--draft-model", str(MODELS / "demo-eagle3"), "--learn", "per-tenant"), "per-salt"),
        (("--draft-model", str(MODELS / "demo-draft")), "needs one head that can be trained further"),
        (("--draft-model", ""), "needs one head that can be trained further"),
        (("--draft-model", str(MODELS / "demo-eagle3"), "--allow-draft-loading"), "--allow-draft-loading"),
    ):
        up = outrider("up", "--detach", "--learn", "shared", *words, *run_dir)
        assert up.returncode == 2, up.stderr
        assert message in up.stderr
        assert not (tmp_path / "run" / "stack.json").exists()
