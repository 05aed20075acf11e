"""What LLM takes, ignores and refuses, before a model is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.offline import LLM
from outrider.offline.speculation import plan_speculation
from outrider.shared.errors import ConfigError

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "models"
TARGET = MODELS / "demo-target"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"quantization": "awq"}, "quantization='awq' is not supported: leave it out: the checkpoint says"),
        ({"disable_log_stats": "no"}, "disable_log_stats='no' is not supported: get_metrics"),
        ({"pipeline_parallel_size": 2}, "use tensor_parallel_size"),
        ({"speculative_model": "models/demo-draft"}, "use speculative_config={'model': ...}"),
        ({"tensor_paralel_size": 2}, "unknown argument 'tensor_paralel_size'"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype: 'fp8_e5m2' is not one of auto, fp8, fp8_e4m3,"),
        ({"dtype": "int4"}, "dtype: 'int4' is not one of auto, half, float16, bfloat16, float, float32"),
        ({"revision": "main"}, "LLM: revision: "),
        ({"tokenizer_revision": "main"}, "the tokenizer is the model's, of the same revision"),
        ({"download_dir": "/models"}, "set that variable"),
        ({"generation_config": "nowhere"}, "LLM: generation_config: nowhere has no generation_config.json"),
        ({"override_generation_config": {"top_p": 2}}, "LLM: override_generation_config: top_p must be between"),
        ({"max_num_seqs": 0}, "max_num_seqs: 0 is below the minimum, 1"),
        ({"device": "tpu"}, "device: 'tpu' is not one of auto, cpu, cuda"),
        ({"model": ROOT / "docs"}, "has no tokenizer.json"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM(**{"model": TARGET, **arguments})
    assert says in refused.value.message


def test_an_argument_that_only_tunes_vllm_may_stay() -> None:
    with (
        pytest.warns(UserWarning, match="swap_space is ignored here: sessions are recomputed"),
        pytest.raises(ConfigError),
    ):
        LLM(TARGET, gpu_memory_utilization=0.8, swap_space=4, disable_log_stats=False, device="tpu")


def test_what_the_text_does_not_depend_on_is_said_and_not_refused() -> None:
    with pytest.warns(UserWarning, match="is ignored here") as said, pytest.raises(ConfigError):
        LLM(TARGET, trust_remote_code=True, limit_mm_per_prompt={"image": 5}, max_num_seqs=None, device="tpu")
    assert [str(one.message) for one in said] == [
        "LLM: trust_remote_code is ignored here: code from a checkpoint is never run",
        "LLM: limit_mm_per_prompt is ignored here: prompts are text",
    ]
    assert all(one.filename == __file__ for one in said)  # points to the caller


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"method": "eagle"}, "method 'eagle' needs a model"),
        ({"method": "eagle", "model": MODELS / "demo-draft"}, "is a checkpoint of kind draft_model, not of method"),
        ({"method": "mtp", "model": MODELS / "demo-draft"}, "is a checkpoint of kind draft_model, not of method mtp"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be a whole number from 1"),
        ({"method": "ngram", "draft_vocab": 8}, "draft_vocab is not supported; known are model, method"),
    ],
)
def test_a_wrong_key_of_speculative_config_is_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_speculation(given, str(TARGET))
    assert refused.value.message.startswith("speculative_config: ")
    assert says in refused.value.message


@pytest.mark.parametrize(
    ("given", "method", "served"),
    [
        (None, "off", ()),
        ({"method": "off", "model": MODELS / "demo-draft"}, "off", ()),
        ({}, "auto", ("suffix", "ngram")),
        ({"method": "suffix"}, "suffix", ("suffix",)),
        ({"method": "deepseek_mtp"}, "mtp", ("mtp",)),
        ({"model": MODELS / "demo-draft"}, "auto", ("draft_model", "suffix", "ngram")),
        ({"model": MODELS / "demo-eagle3"}, "auto", ("eagle3", "suffix", "ngram")),
        ({"model": MODELS / "demo-eagle3", "method": "eagle3+suffix"}, "eagle3+suffix", ("eagle3", "suffix", "ngram")),
        ({"model": MODELS / "demo-medusa", "method": "medusa"}, "medusa", ("medusa",)),
    ],
)
def test_methods_by_name_and_by_checkpoint(given: dict[str, Any] | None, method: str, served: tuple[str, ...]) -> None:
    plan = plan_speculation(given, str(TARGET))
    assert (plan.config.method, plan.methods) == (method, served)


def test_keys_go_to_the_service_that_they_belong_to() -> None:
    plan = plan_speculation(
        {"method": "ngram", "num-speculative-tokens": 3, "prompt_lookup_max": 4, "rejection_sample_method": "standard"},
        str(TARGET),
    )
    assert plan.config.num_speculative_tokens == 3
    assert plan.verifier == {"prompt_lookup_max": 4, "rejection_sample_method": "standard"}


def test_importing_it_loads_no_torch() -> None:
    code = (
        "import sys\nimport outrider.offline\nfrom outrider import LLM, AsyncLLM, SamplingParams\n"
        "loaded = {'torch', 'transformers', 'numba', 'triton'} & set(sys.modules)\nassert not loaded, loaded"
    )
    outcome = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert outcome.returncode == 0, outcome.stderr
