"""vLLM's `speculative_config` to the settings of gateway, drafter and verifier that its keys belong to."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.requests import METHOD_AUTO, METHOD_OFF
from shared.errors import ConfigError
from shared.speculative_config import SpeculativeConfig, parse_speculative_config
from shared.vllm_keys import IGNORED, OF_DRAFTER, OF_GATEWAY, OF_VERIFIER, given_keys

_WITHOUT_CHECKPOINT = ("suffix", "ngram")


@dataclass(frozen=True)
class SpeculationPlan:
    """methods: what the drafter serves; none: nothing is drafted. drafter, verifier: further settings of theirs."""

    config: SpeculativeConfig
    draft_model: str = ""
    methods: tuple[str, ...] = ()
    drafter: Mapping[str, object] = field(default_factory=dict)
    verifier: Mapping[str, object] = field(default_factory=dict)


def plan_speculation(speculative_config: Mapping[str, Any] | None) -> SpeculationPlan:
    """None, or method "off", drafts nothing. A checkpoint without a method is recognised, and drafts as much as pays.

    Raises ConfigError that names the key, CheckpointRefused for a draft that cannot be served.
    """
    if speculative_config is None:
        return SpeculationPlan(SpeculativeConfig(method=METHOD_OFF))
    given = given_keys(speculative_config, "speculative_config")
    for key in given:
        if key in IGNORED and given[key] != 1:
            warnings.warn(f"speculative_config: {key} is ignored here: {IGNORED[key]}", UserWarning, stacklevel=3)
    config = _parsed({key: given[key] for key in OF_GATEWAY if key in given})
    draft_model = str(given.get("model", ""))
    return SpeculationPlan(
        config=config,
        draft_model=draft_model,
        methods=_methods(config.method, draft_model),
        drafter={key: given[key] for key in OF_DRAFTER if key in given},
        verifier={key: given[key] for key in OF_VERIFIER if key in given},
    )


def _parsed(of_gateway: Mapping[str, Any]) -> SpeculativeConfig:
    try:
        return parse_speculative_config(json.dumps(of_gateway, default=str))
    except ConfigError as error:
        raise ConfigError(error.message.replace("--speculative-config", "speculative_config", 1)) from None


def _methods(method: str, draft_model: str) -> tuple[str, ...]:
    if method == METHOD_OFF:
        return ()
    if not draft_model:
        if method == METHOD_AUTO:
            return _WITHOUT_CHECKPOINT
        if method not in _WITHOUT_CHECKPOINT:
            raise ConfigError(f"speculative_config: method {method!r} needs a model", param="model")
        return (method,)
    from drafter_service.checkpoints.recognise import recognise

    kind = recognise(draft_model)
    if method not in (METHOD_AUTO, kind):
        raise ConfigError(
            f"speculative_config: {draft_model} is a checkpoint of kind {kind}, not of method {method}", param="method"
        )
    return (kind,)
