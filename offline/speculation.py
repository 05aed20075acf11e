"""vLLM's `speculative_config` to the settings of gateway, drafter and verifier that its keys belong to."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gateway.config import SpeculativeConfig, parse_speculative_config
from gateway.requests import METHOD_AUTO, METHOD_OFF
from shared.errors import ConfigError

_WITHOUT_CHECKPOINT = ("suffix", "ngram")
_OF_DRAFTER = (
    "enforce_eager",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)
_OF_VERIFIER = ("rejection_sample_method",)
_OF_GATEWAY = tuple(entry.name for entry in fields(SpeculativeConfig))
# They place the draft, or size it; no output depends on them.
_IGNORED = {
    "draft_tensor_parallel_size": "a draft runs in this process",
    "max_model_len": "a draft follows the target as far as it can",
}
_KNOWN = ("model", *_OF_GATEWAY, *_OF_DRAFTER, *_OF_VERIFIER, *_IGNORED)


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
    given = {key.replace("-", "_"): value for key, value in speculative_config.items() if value is not None}
    for key in given:
        if key not in _KNOWN:
            raise ConfigError(f"speculative_config: {key} is not supported; known are {', '.join(_KNOWN)}", param=key)
        if key in _IGNORED and given[key] != 1:
            warnings.warn(f"speculative_config: {key} is ignored here: {_IGNORED[key]}", UserWarning, stacklevel=3)
    config = _parsed({key: given[key] for key in _OF_GATEWAY if key in given})
    draft_model = str(given.get("model", ""))
    return SpeculationPlan(
        config=config,
        draft_model=draft_model,
        methods=_methods(config.method, draft_model),
        drafter={key: given[key] for key in _OF_DRAFTER if key in given},
        verifier={key: given[key] for key in _OF_VERIFIER if key in given},
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
