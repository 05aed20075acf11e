"""`outrider load-draft` on a running stack: the same text before and after, and who shows the version."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from e2e_stack import MODELS

from tests.ports import stack_ports
from tests.verifier_service.drafting.other_weights import with_noise

pytestmark = pytest.mark.storm

OUTRIDER = str(Path(sys.executable).with_name("outrider"))
HEAD = MODELS / "demo-eagle3"


def outrider(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([OUTRIDER, *words], capture_output=True, text=True, timeout=400, check=False)


def answer(url: str) -> str:
    body = {"prompt": "def add(a, b):", "max_tokens": 60, "temperature": 0, "speculation": {"method": "eagle3"}}
    return str(httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status().json()["choices"][0])


@pytest.mark.parametrize(("is_allowed", "num_drafters"), [(True, 0), (True, 1), (False, 1)])
def test_load_draft(is_allowed: bool, num_drafters: int, tmp_path: Path) -> None:
    """In the verifier that drafts itself, and in a drafter."""
    (port, ports), run_dir = stack_ports(), ("--run-dir", str(tmp_path / "run"))
    allowed = ("--drafters", str(num_drafters), *(("--allow-draft-loading",) if is_allowed else ()))
    up = outrider("up", "--detach", "--draft-model", str(HEAD), *ports, *allowed, *run_dir)
    assert up.returncode == 0, up.stderr
    try:
        url = f"http://127.0.0.1:{port}"
        before = answer(url)
        loaded = outrider("load-draft", str(with_noise(HEAD, tmp_path / "other", 0.1)), "--json", *run_dir)
        if not is_allowed:
            assert loaded.returncode == 2
            assert "--allow-draft-loading" in loaded.stderr
            return
        assert loaded.returncode == 0, loaded.stderr
        [draft] = json.loads(loaded.stdout)["loaded"]
        assert (draft["method"], draft["model"], draft["version"]) == ("eagle3", "other", 2)
        assert answer(url) == before
        refused = outrider("load-draft", str(MODELS / "demo-draft"), *run_dir)
        assert refused.returncode == 2
        assert "methods with weights here: eagle3" in refused.stderr
        fleet = json.loads(outrider("status", "--json", *run_dir).stdout)["fleet"]
        drafting = fleet["drafters" if num_drafters else "verifiers"]
        assert {"name": "eagle3", "model": "other", "version": 2, "heads": []} in drafting[0]["methods"]
    finally:
        outrider("down", *run_dir)


@pytest.mark.parametrize("num_drafters", [0, 1])
def test_several_heads(num_drafters: int, tmp_path: Path) -> None:
    """Sessions find the better of two heads; one of them is loaded anew; the text stays."""
    other = with_noise(HEAD, tmp_path / "other", 1.0)
    (port, ports), run_dir = stack_ports(), ("--run-dir", str(tmp_path / "run"))
    heads = ("--draft-model", f"bad={other},good={HEAD}", "--drafters", str(num_drafters), "--allow-draft-loading")
    up = outrider("up", "--detach", *ports, *heads, *run_dir)
    assert up.returncode == 0, up.stderr
    try:
        url = f"http://127.0.0.1:{port}"
        assert len({answer(url) for _ in range(30)}) == 1
        loaded = outrider("load-draft", f"bad={HEAD}", "--json", *run_dir)
        assert loaded.returncode == 0, loaded.stderr
        refused = outrider("load-draft", str(HEAD), *run_dir)
        assert refused.returncode == 2
        assert "NAME=FOLDER, NAME one of bad, good" in refused.stderr
        fleet = json.loads(outrider("status", "--json", *run_dir).stdout)["fleet"]
        drafting = fleet["drafters" if num_drafters else "verifiers"]
        [method] = [method for method in drafting[0]["methods"] if method["name"] == "eagle3"]
        bad, good = method["heads"]
        assert (bad["version"], good["version"]) == (2, 1)
        assert bad["num_sessions"] + good["num_sessions"] == 30
        assert good["num_sessions"] > 20
        assert f"heads of eagle3: bad {bad['num_sessions']} ended sessions" in outrider("status", *run_dir).stdout
    finally:
        outrider("down", *run_dir)
