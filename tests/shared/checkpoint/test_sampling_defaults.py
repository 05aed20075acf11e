"""Which sampling parameters a request gets that leaves them out, by vLLM's two settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.shared.checkpoint.sampling_defaults import SamplingDefaults, load_sampling_defaults
from outrider.shared.errors import ConfigError

MODELS = Path(__file__).parents[3] / "models"
LLAMA = {"bos_token_id": 1, "eos_token_id": [2, 5], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
QWEN = {**LLAMA, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05, "max_new_tokens": 40}


def folder_with(path: Path, config: object) -> str:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, SamplingDefaults(temperature=0.6, top_p=0.9)),
        (QWEN, SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05, max_tokens=40)),
        ({"top_k": -1, "temperature": None, "max_length": 4096}, SamplingDefaults()),
        ({"do_sample": False, "temperature": 0}, SamplingDefaults(temperature=0)),
    ],
)
def test_auto_takes_the_models(tmp_path: Path, config: object, expected: SamplingDefaults) -> None:
    model = folder_with(tmp_path, config)
    assert load_sampling_defaults(model, "auto", "") == expected
    assert load_sampling_defaults(model, "vllm", "") == SamplingDefaults()


def test_a_model_without_the_file_has_none(tmp_path: Path) -> None:
    assert load_sampling_defaults(str(tmp_path), "auto", "") == SamplingDefaults()


@pytest.mark.parametrize("model", ["demo-target", "demo-draft"])
def test_the_demo_models_have_none(model: str) -> None:
    assert load_sampling_defaults(str(MODELS / model), "auto", "") == SamplingDefaults()


def test_a_folders_replace_the_models(tmp_path: Path) -> None:
    model, other = folder_with(tmp_path / "model", LLAMA), folder_with(tmp_path / "other", {"top_k": 7})
    assert load_sampling_defaults(model, other, "") == SamplingDefaults(top_k=7)


def test_single_values_are_replaced(tmp_path: Path) -> None:
    model = folder_with(tmp_path, QWEN)
    defaults = load_sampling_defaults(model, "auto", '{"temperature": 0.1, "top_k": null}')
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.1, 0.9, 0)
    assert load_sampling_defaults(model, "vllm", '{"min_p": 0.2}') == SamplingDefaults(min_p=0.2)


def test_a_length_limits_every_request_unless_it_is_the_checkpoints(tmp_path: Path) -> None:
    model, other = folder_with(tmp_path / "model", QWEN), folder_with(tmp_path / "other", {"max_new_tokens": 8})
    asked = [("auto", ""), ("auto", '{"max_new_tokens": 9}'), (other, ""), (other, '{"max_new_tokens": null}')]
    found = [load_sampling_defaults(model, config, override) for config, override in asked]
    assert [(entry.max_tokens, entry.max_tokens_limit) for entry in found] == [(40, None), (9, 9), (8, 8), (None, None)]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "generation_config.json cannot be read as JSON"),
        ("[]", "generation_config.json is a JSON list, not an object"),
        ({"temperature": 500}, "generation_config.json: temperature must be between 0 and 100, got 500"),
        ({"top_p": 0}, "generation_config.json: top_p must be in (0, 1]"),
        ({"top_k": 2.5}, "generation_config.json: top_k must be a whole number, got 2.5"),
        ({"min_p": True}, "generation_config.json: min_p must be a number, got True"),
        ({"repetition_penalty": "1"}, "generation_config.json: repetition_penalty must be a number, got '1'"),
        ({"max_new_tokens": 0}, "generation_config.json: max_new_tokens must be between 1 and"),
    ],
)
def test_a_wrong_file_is_named_with_its_field(tmp_path: Path, config: object, said: str) -> None:
    model = folder_with(tmp_path, config)
    with pytest.raises(ConfigError) as refused:
        load_sampling_defaults(model, "auto", "")
    assert refused.value.message.startswith(f"--generation-config: {tmp_path}")
    assert said in refused.value.message
    assert refused.value.message.endswith("or give vllm to use none of it")
    assert load_sampling_defaults(model, "vllm", "") == SamplingDefaults()


@pytest.mark.parametrize(
    ("generation_config", "override", "said"),
    [
        ("nowhere", "", "--generation-config: nowhere has no generation_config.json; give auto, vllm or a folder"),
        ("vllm", "{", "--override-generation-config is not JSON"),
        ("vllm", "[1]", "--override-generation-config: must be a JSON object"),
        ("vllm", '{"eos_token_id": 2}', "--override-generation-config: eos_token_id is no sampling default; known are"),
        ("vllm", '{"top_p": 2}', "--override-generation-config: top_p must be between 0 and 1, got 2"),
    ],
)
def test_a_wrong_setting_is_named(generation_config: str, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_sampling_defaults("", generation_config, override)
    assert refused.value.message.startswith(said)
