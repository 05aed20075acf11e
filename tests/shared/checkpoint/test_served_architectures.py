"""What is refused by config.json alone is what the engine refuses, and is refused before a download or a start."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.shared.checkpoint.architectures import read_architectures, require_served_architecture
from outrider.shared.errors import ConfigError
from tests.engine.architecture_survey import by_config_alone
from tests.hub_server import Hub, running_hub

# seconds of processor time; a refusal needs no torch
LONGEST = 5
SERVE = "from outrider.client.cli.main import main; main()"


def seconds_of_children() -> float:
    """Processor time of all processes that have ended: waiting for other work on the machine does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.storm
def test_the_table_is_what_the_engine_says() -> None:
    assert read_architectures() == by_config_alone()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "hy_v4"}, "layers of type indexed_attention choose which tokens"),
        ({"model_type": "paligemma"}, "model type 'paligemma' is multimodal, and its text part is not served"),
        ({"model_type": "xglm"}, "does not route its attention through transformers' attention interface"),
        ({"model_type": "whisper"}, "WhisperForCausalLM is an encoder-decoder model"),
        ({"model_type": "kimi_k9"}, "has no causal language model of model type 'kimi_k9'"),
        ({"model_type": "x" * 100_000}, f"model type '{'x' * 80}'"),
    ],
)
def test_the_reason(config: dict[str, object], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as refused:
        require_served_architecture(tmp_path)
    assert reason in refused.value.message
    assert len(refused.value.message) < 400


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "kimi_k25"},
        {"model_type": 5},
        {},
        {"model_type": "minimax_m3_vl", "text_config": {"sparse_attention_config": {"sparse_attention_freq": [0, 0]}}},
        {"model_type": "minimax_m3_vl", "text_config": {"sparse_attention_config": {"sparse_attention_freq": 5}}},
        {"model_type": "minimax_m3_vl", "text_config": 5},
    ],
)
def test_the_engine_decides_about_the_rest(config: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    require_served_architecture(tmp_path)


def test_no_weights_are_downloaded_of_what_is_refused(tmp_path: Path) -> None:
    files = {"config.json": b'{"model_type": "hy_v4"}', "model.safetensors": b"w" * 100, "tokenizer.json": b"{}"}
    with running_hub(Hub({"org/sparse": files})) as hub:
        env = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_TOKEN": ""}
        command = [
            sys.executable,
            "-m",
            "outrider.client.cli.main",
            "serve",
            "org/sparse",
            "--run-dir",
            str(tmp_path / "run"),
        ]
        start = seconds_of_children()
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        seconds = seconds_of_children() - start
    said = " ".join(done.stderr.split())
    assert (done.returncode, "sparse attention" in said) == (2, True), said
    assert not [request for request in hub.requests if "model.safetensors" in request]
    assert not (tmp_path / "run").exists()
    assert seconds < LONGEST
