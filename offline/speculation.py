"""Splits vLLM's `speculative_config` into settings of the gateway and of the verifier, which drafts itself."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.engine.model.local_model import local_model
from outrider.gateway.request.types import METHOD_AUTO, METHOD_OFF
from outrider.shared.checkpoint.mtp_layers import has_mtp_layers
from outrider.shared.draft_policy.draft_methods import FROM_TARGET, WITHOUT_CHECKPOINT, with_lookup
from outrider.shared.errors import ConfigError
from outrider.shared.speculative_config import SpeculativeConfig, parse_speculative_config
from outrider.shared.vllm_keys import IGNORED, OF_DRAFTER, OF_GATEWAY, OF_VERIFIER, given_keys

# A verifier's setting, where it has another name than vLLM's key for a draft.
_VERIFIER_NAMES = {"enforce_eager": "local_enforce_eager"}


@dataclass(frozen=True)
class SpeculationPlan:
    """methods: those that the verifier drafts with; empty: no speculation. verifier: its further settings."""

    config: SpeculativeConfig
    draft_model: str = ""
    methods: tuple[str, ...] = ()
    verifier: Mapping[str, object] = field(default_factory=dict)


def plan_speculation(speculative_config: Mapping[str, Any] | None, target: str) -> SpeculationPlan:
    """Plans the speculation of a config; None or method "off": no speculation.

    The method of a checkpoint given without one is detected, and `auto` chooses its draft lengths.
    target: its folder; without a checkpoint its own MTP layers draft, if it has any.

    Raises ConfigError that names the key, CheckpointRefused for an unusable draft.
    """
    if speculative_config is None:
        return SpeculationPlan(SpeculativeConfig(method=METHOD_OFF))
    given = given_keys(speculative_config, "speculative_config")
    for key in given:
        if key in IGNORED and given[key] != 1:
            warnings.warn(f"speculative_config: {key} is ignored here: {IGNORED[key]}", UserWarning, stacklevel=3)
    config = _parsed({key: given[key] for key in OF_GATEWAY if key in given})
    draft_model = local_model(str(given.get("model", "")), "speculative_config: model")
    return SpeculationPlan(
        config=config,
        draft_model=draft_model,
        methods=_methods(config.method, draft_model, target),
        verifier={_VERIFIER_NAMES.get(key, key): given[key] for key in (*OF_DRAFTER, *OF_VERIFIER) if key in given},
    )


def _parsed(of_gateway: Mapping[str, Any]) -> SpeculativeConfig:
    try:
        return parse_speculative_config(json.dumps(of_gateway, default=str))
    except ConfigError as error:
        raise ConfigError(error.message.replace("--speculative-config", "speculative_config", 1)) from None


def _methods(method: str, draft_model: str, target: str) -> tuple[str, ...]:
    if method == METHOD_OFF:
        return ()
    if not draft_model:
        if method == METHOD_AUTO:
            return (*(FROM_TARGET if has_mtp_layers(Path(target)) else ()), *WITHOUT_CHECKPOINT)
        if method not in (*FROM_TARGET, *WITHOUT_CHECKPOINT):
            raise ConfigError(f"speculative_config: method {method!r} needs a model", param="model")
        return (method,)
    from outrider.drafting.checkpoints.recognise import recognise

    kind = recognise(draft_model)
    if method not in (METHOD_AUTO, kind, with_lookup(kind)):
        raise ConfigError(
            f"speculative_config: {draft_model} is a checkpoint of kind {kind}, not of method {method}", param="method"
        )
    return (kind,) if method == kind else (kind, *WITHOUT_CHECKPOINT)
