"""Names of draft methods: a server's wrong one is refused by name; vLLM's are known."""

from __future__ import annotations

import json

import pytest

from outrider.client.stack.serve_plan import plan_serving
from outrider.drafting.checkpoints.recognise import KINDS
from outrider.drafting.methods import registry
from outrider.shared.draft_policy.draft_methods import (
    DRAFT_METHODS,
    FROM_CHECKPOINT,
    FROM_TARGET,
    WITHOUT_CHECKPOINT,
    with_lookup,
)
from outrider.shared.errors import ConfigError
from outrider.shared.speculative_config import parse_speculative_config

# SpeculativeMethod of vLLM's vllm/config/speculative.py.
OF_VLLM = (
    *("ngram", "medusa", "mlp_speculator", "draft_model", "suffix", "eagle", "eagle3", "ngram_gpu"),
    *("mtp", "deepseek_mtp", "dots3_note_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp"),
    *("glm_ocr_mtp", "ernie_mtp", "nemotron_h_mtp", "exaone_moe_mtp", "exaone4_5_mtp", "qwen3_next_mtp"),
    *("qwen4_exp_mtp", "qwen3_5_mtp", "longcat_flash_mtp", "bailing_hybrid_v3_mtp", "minimax_m3_mtp"),
    *("bailing_hybrid_mtp", "kimi_k3_mtp", "pangu_ultra_moe_mtp", "step3p5_mtp", "step5_mtp", "hy_v3_mtp"),
    *("hy_v4_mtp", "gemma4_mtp", "inkling_mtp", "glm5_next_mtp"),
    *("dflash", "dspark", "extract_hidden_states", "custom_class"),
)


def config_of(method: str) -> str:
    return json.dumps({"method": method})


def test_the_names_are_those_of_the_methods_that_exist() -> None:
    assert set(WITHOUT_CHECKPOINT) == registry._WITHOUT_CHECKPOINT.keys()
    assert set(FROM_TARGET) == registry._FROM_TARGET.keys()
    assert set(FROM_CHECKPOINT) == set(registry._FROM_CHECKPOINT)
    assert {*FROM_CHECKPOINT, *FROM_TARGET} == set(KINDS)  # an assistant's folder drafts as mtp


@pytest.mark.parametrize("method", ["foo", "NGRAM", "", "eagle4"])
def test_an_unknown_method_is_refused_with_those_that_exist(method: str) -> None:
    with pytest.raises(ConfigError, match="--speculative-config: method ") as refused:
        parse_speculative_config(config_of(method))
    names = ("auto", "off", *FROM_TARGET, *FROM_CHECKPOINT, *WITHOUT_CHECKPOINT, "+suffix")
    assert all(name in refused.value.message for name in names)


@pytest.mark.parametrize("method", [*map(with_lookup, (*FROM_TARGET, *FROM_CHECKPOINT))])
def test_a_method_with_weights_may_have_a_lookup_before_it(method: str) -> None:
    assert parse_speculative_config(config_of(method)).method == method
    for wrong in ("ngram+suffix", "suffix+suffix", f"{method}+suffix", "+suffix"):
        with pytest.raises(ConfigError, match="one with weights may end in \\+suffix"):
            parse_speculative_config(config_of(wrong))


@pytest.mark.parametrize("method", OF_VLLM)
def test_each_method_of_vllm_is_served_or_refused_with_what_to_use_instead(method: str) -> None:
    if method in DRAFT_METHODS or method == "ngram_gpu":
        assert parse_speculative_config(config_of(method)).method == method.removesuffix("_gpu")
    elif method.endswith("_mtp"):
        assert parse_speculative_config(config_of(method)).method == "mtp"
    else:
        with pytest.raises(ConfigError, match=f"--speculative-config: method {method} is not served: .+"):
            parse_speculative_config(config_of(method))


@pytest.mark.parametrize("method", ["foo", "custom_class"])
def test_serve_refuses_it_too(method: str) -> None:
    with pytest.raises(ConfigError, match=f"method '?{method}"):
        plan_serving(config_of(method))
