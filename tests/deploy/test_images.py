"""The images are built and the stack of docker-compose.yml serves one request, by the `docker` command of the PATH.

Without Prometheus and Grafana, which are images of others. Skipped where no engine runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.client.stack.processes import free_port
from tests.hub_server import COMMIT, Hub, running_hub

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
def variables() -> Iterator[dict[str, str]]:
    """Of a stack with a free port, and one thread for the verifier."""
    if shutil.which("docker") is None:
        pytest.skip("docker is not on the PATH")
    if subprocess.run(["docker", "info"], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("no container engine runs here: `docker info` fails")
    port, grpc_port = free_port(), free_port()
    yield {"OUTRIDER_PORT": str(port), "OUTRIDER_GRPC_PORT": str(grpc_port), "VERIFIER_THREADS": "1"}
    compose("down", "--volumes", "--timeout", "5")


def start(variables: dict[str, str], num_drafters: int) -> str:
    """The gateway's address, before a verifier and Redis."""
    done = compose(
        *("up", "--build", "--wait", "--scale", f"drafter={num_drafters}", "gateway", "drafter", "verifier", "redis"),
        **variables,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return f"http://127.0.0.1:{variables['OUTRIDER_PORT']}"


def completion(url: str, model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": "import os", "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


@pytest.mark.storm
@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_images_are_built_and_serve_a_request(variables: dict[str, str]) -> None:
    url = start(variables, num_drafters=3)
    assert completion(url, "demo-target")["usage"]["completion_tokens"] == 16
    with urllib.request.urlopen(f"{url}/fleet", timeout=30) as reply:
        fleet = json.load(reply)
    assert [member["healthy"] for member in fleet["drafters"]] == [True] * 3


@pytest.mark.storm
@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_a_model_of_the_hub_is_downloaded_once_and_served(variables: dict[str, str]) -> None:
    repos = {
        f"org/{kind}": {path.name: path.read_bytes() for path in (ROOT / f"models/demo-{kind}").iterdir()}
        for kind in ("target", "draft")
    }
    with running_hub(Hub(repos), host=bridge_address()) as hub:
        variables |= {"MODEL": "org/target", "DRAFT_MODEL": "org/draft", "HF_ENDPOINT": hub.url}
        url = start(variables, num_drafters=1)
        answer = completion(url, "org/target")
        assert answer["usage"]["completion_tokens"] == 16
        asked = [request for request in hub.requests if request.startswith("GET") and "safetensors" in request]
        assert sorted(asked) == [f"GET /org/{kind}/resolve/{COMMIT}/model.safetensors" for kind in ("draft", "target")]
    # The Hub is away: the volume has it all.
    compose("down", "--timeout", "5")
    url = start(variables, num_drafters=1)
    assert completion(url, "org/target")["choices"][0]["text"] == answer["choices"][0]["text"]


@pytest.mark.storm
@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_one_container_serves_a_model_of_the_hub(variables: dict[str, str]) -> None:
    """`docker run -p 8000:8000 IMAGE ORG/MODEL`."""
    port, image = variables["OUTRIDER_PORT"], "outrider-test"
    docker("build", "-f", "deploy/docker/outrider.Dockerfile", "-t", image, ".")
    files = {path.name: path.read_bytes() for path in (ROOT / "models/demo-target").iterdir()}
    with running_hub(Hub({"org/target": files}), host=bridge_address()) as hub:
        container = docker(
            *("run", "--detach", "--init", "-p", f"127.0.0.1:{port}:8000", "-e", f"HF_ENDPOINT={hub.url}"),
            *(image, "org/target"),
        )
        try:
            until_ready(f"http://127.0.0.1:{port}/ready", container)
            assert completion(f"http://127.0.0.1:{port}", "org/target")["usage"]["completion_tokens"] == 16
        finally:
            docker("rm", "--force", "--volumes", container)


def docker(*arguments: str) -> str:
    done = subprocess.run(
        ["docker", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


def until_ready(url: str, container: str) -> None:
    """Its first start compiles kernels."""
    deadline = time.monotonic() + BUILD_TIMEOUT_S / 2
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30):
                return
        except OSError:
            assert docker("inspect", "--format", "{{.State.Running}}", container) == "true", docker("logs", container)
            assert time.monotonic() < deadline, docker("logs", container)
            time.sleep(1)


def bridge_address() -> str:
    """This machine's, as containers see it."""
    command = ["docker", "network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
