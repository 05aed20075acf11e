"""The table of vLLM's keys against the settings of the parts that it sends them to."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from outrider.drafter_service.config import DrafterConfig
from outrider.shared.errors import ConfigError
from outrider.shared.speculative_config import SpeculativeConfig, parse_speculative_config
from outrider.shared.vllm_keys import FLAGS_ELSEWHERE, KNOWN, OF_DRAFTER, OF_GATEWAY, OF_VERIFIER, given_keys
from outrider.verifier_service.config import VerifierConfig


@pytest.mark.parametrize(
    ("keys", "config"), [(OF_GATEWAY, SpeculativeConfig), (OF_DRAFTER, DrafterConfig), (OF_VERIFIER, VerifierConfig)]
)
def test_every_key_is_a_setting_of_its_part(keys: tuple[str, ...], config: Any) -> None:
    settings = {entry.name for entry in fields(config)}
    assert set(keys) <= settings
    assert config is not SpeculativeConfig or set(keys) == settings


def test_a_key_has_one_part() -> None:
    assert len(set(KNOWN)) == len(KNOWN)


@pytest.mark.parametrize("key", FLAGS_ELSEWHERE)
def test_the_gateway_says_whose_flag_a_key_is(key: str) -> None:
    with pytest.raises(ConfigError, match=f"give {key} as the (drafter|verifier)'s --[a-z-]+$"):
        parse_speculative_config(f'{{"{key}": 1}}')


def test_what_says_nothing_is_left_out_and_dashes_are_underscores() -> None:
    assert given_keys({"num-speculative-tokens": 7, "model": None}, "x") == {"num_speculative_tokens": 7}
    with pytest.raises(ConfigError, match="x: draft_model_config is not supported; known are model, method") as refused:
        given_keys({"draft_model_config": "awq"}, "x")
    assert refused.value.param == "draft_model_config"
