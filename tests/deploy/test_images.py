"""The images are built and the stack of docker-compose.yml serves one request, by the `docker` command of the PATH.

Without Prometheus and Grafana, which are images of others. Skipped where no engine runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.client.stack.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
PROJECT = f"outrider-test-{os.getpid()}"
# A build downloads torch.
BUILD_TIMEOUT_S = 3000


def compose(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["docker", "compose", "--project-name", PROJECT, "--project-directory", str(ROOT), *arguments]
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
    )


@pytest.fixture
def url() -> Iterator[str]:
    """The gateway's, before three drafters, a verifier and Redis."""
    if shutil.which("docker") is None:
        pytest.skip("docker is not on the PATH")
    if subprocess.run(["docker", "info"], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("no container engine runs here: `docker info` fails")
    port, grpc_port = free_port(), free_port()
    services = ("gateway", "drafter", "verifier", "redis")
    try:
        done = compose(
            *("up", "--build", "--wait", "--scale", "drafter=3", *services),
            OUTRIDER_PORT=str(port),
            OUTRIDER_GRPC_PORT=str(grpc_port),
            VERIFIER_THREADS="1",
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        yield f"http://127.0.0.1:{port}"
    finally:
        compose("down", "--volumes", "--timeout", "5")


@pytest.mark.storm
@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_images_are_built_and_serve_a_request(url: str) -> None:
    body = {"model": "demo-target", "prompt": "import os", "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer = json.load(reply)
    assert answer["usage"]["completion_tokens"] == 16
    with urllib.request.urlopen(f"{url}/fleet", timeout=30) as reply:
        fleet = json.load(reply)
    assert [member["healthy"] for member in fleet["drafters"]] == [True] * 3
