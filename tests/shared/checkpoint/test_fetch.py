"""The download before a service starts, from a stand-in of the Hub."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import Hub, running_hub

FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights", "README.md": b"unread"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub(Hub({"org/big": FILES, "org/small": FILES}, gated=frozenset({"org/small"}))) as running:
        yield running


def fetch(hub: Hub, home: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider.shared.checkpoint.fetch", *arguments]
    env = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_TOKEN": "", **env}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def names(home: Path, repo: str) -> set[str]:
    [snapshot] = (home / "hub" / f"models--{repo.replace('/', '--')}" / "snapshots").iterdir()
    return {path.name for path in snapshot.iterdir()}


def test_it_downloads_hub_ids_and_passes_over_the_rest(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    done = fetch(hub, tmp_path / "home", "org/big", "", f"{folder},org/small", HF_TOKEN="token")
    assert done.returncode == 0, done.stderr
    for repo in ("org/big", "org/small"):
        assert names(tmp_path / "home", repo) == {"config.json", "tokenizer.json", "model.safetensors"}


def test_no_weights(hub: Hub, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path, "--no-weights", "org/big").returncode == 0
    assert names(tmp_path, "org/big") == {"config.json", "tokenizer.json"}


def test_a_refusal_ends_with_2_and_says_what_to_do(hub: Hub, tmp_path: Path) -> None:
    done = fetch(hub, tmp_path, "org/big", "org/small")
    assert done.returncode == 2
    assert "org/small is gated" in done.stderr
    assert "HF_TOKEN" in done.stderr
