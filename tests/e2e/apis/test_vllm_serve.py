"""vLLM's online example of speculative decoding: `vllm serve` as `outrider serve`, its client as it is written.

The Hub is a small server here that has the demo models under the ids that the example names.

https://docs.vllm.ai/en/latest/features/speculative_decoding/draft_model/, with the ports changed.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.hub_server import Hub, running_hub
from tests.ports import server_port

pytestmark = pytest.mark.storm
ROOT = Path(__file__).parents[3]
START_TIMEOUT_S = 240.0
SERVE = """
vllm serve Qwen/Qwen3-4B-Thinking-2507 \\
    --host 0.0.0.0 \\
    --port 8000 \\
    --seed 42 \\
    -tp 1 \\
    --max-model-len 2048 \\
    --gpu-memory-utilization 0.8 \\
    --speculative-config '{"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 5, "method": "draft_model"}'
"""
CLIENT = """
from openai import OpenAI

# Modify OpenAI's API key and API base to use vLLM's API server.
openai_api_key = "EMPTY"
openai_api_base = "http://localhost:8000/v1"

client = OpenAI(
    # defaults to os.environ.get("OPENAI_API_KEY")
    api_key=openai_api_key,
    base_url=openai_api_base,
)

models = client.models.list()
model = models.data[0].id

# Completion API
stream = False
completion = client.completions.create(
    model=model,
    prompt="The future of AI is",
    echo=False,
    n=1,
    stream=stream,
)

print("Completion results:")
if stream:
    for c in completion:
        print(c)
else:
    print(completion)
"""
MODELS = {
    "Qwen/Qwen3-4B-Thinking-2507": ROOT / "models/demo-target",
    "Qwen/Qwen3-0.6B": ROOT / "models/demo-draft",
}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    repos = {name: {file.name: file.read_bytes() for file in folder.iterdir()} for name, folder in MODELS.items()}
    with running_hub(Hub(repos)) as running:
        yield running


@pytest.fixture(scope="module")
def port(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a server that was started with vLLM's line. It must come up, and Ctrl-C must end it well."""
    port, grpc_port, run_dir = server_port(), server_port(), tmp_path_factory.mktemp("serve")
    command = shlex.split(SERVE.replace("--port 8000", f"--port {port}").replace("\\\n", " "))
    assert command[:2] == ["vllm", "serve"]
    command = [sys.executable, "-m", "outrider.client.cli.main", *command[1:], "--grpc-port", str(grpc_port)]
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(run_dir / "hub")}
    with (run_dir / "serve.log").open("wb") as log_file:
        process = subprocess.Popen(
            [*command, "--run-dir", str(run_dir)], stdout=log_file, stderr=subprocess.STDOUT, env=environment
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (run_dir / "stack.json").is_file():
        assert process.poll() is None, (run_dir / "serve.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    try:
        yield port
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(120)
        log = (run_dir / "serve.log").read_text()
    assert code == 0, log
    assert "ignored: --seed (set the seed per request)" in " ".join(log.split())


def test_its_client_gets_a_completion(port: int) -> None:
    code = CLIENT.replace("localhost:8000", f"localhost:{port}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match(r"Completion results:\nCompletion\(id='cmpl-\w+', choices=\[CompletionChoice\(", done.stdout)
    # No seed and temperature 1: it may end before the 16 tokens that are the default.
    assert re.search(r"completion_tokens=([1-9]|1[0-6])\b", done.stdout)
    # The settings of --speculative-config; how much of it was in time is another matter on a busy machine.
    assert "'num_spec_tokens': 5" in done.stdout
    [model] = httpx.get(f"http://localhost:{port}/v1/models", timeout=20).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("Qwen/Qwen3-4B-Thinking-2507", 2048)
