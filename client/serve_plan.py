"""vLLM's `--speculative-config` to the settings of the parts that its keys belong to here.

Not here: what the values must be, which each part checks itself when it starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import ConfigError

_OF_GATEWAY = ("method", "num_speculative_tokens", "token_tree")
_OF_DRAFTER = (
    "prompt_lookup_max",
    "prompt_lookup_min",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)
_OF_VERIFIER = ("rejection_sample_method",)
# They place the draft, or size it; no output depends on them.
_IGNORED = {
    "draft_tensor_parallel_size": "a draft runs in one process",
    "max_model_len": "a draft follows the target as far as it can",
}
_KNOWN = ("model", *_OF_GATEWAY, *_OF_DRAFTER, *_OF_VERIFIER, *_IGNORED)


@dataclass(frozen=True)
class ServePlan:
    """gateway_config: its --speculative-config. ignored: what was passed over, in words."""

    draft_model: str
    gateway_config: str
    drafter_args: tuple[str, ...] = ()
    verifier_args: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def plan_serving(speculative_config: str) -> ServePlan:
    """Empty: nothing is drafted, as in vLLM. Raises ConfigError that names the key."""
    if not speculative_config:
        return ServePlan("", '{"method": "off"}')
    try:
        raw = json.loads(speculative_config)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--speculative-config is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError("--speculative-config must be a JSON object")
    given = {key.replace("-", "_"): value for key, value in raw.items() if value is not None}
    for key in given.keys() - set(_KNOWN):
        raise ConfigError(f"--speculative-config: {key} is not supported; known are {', '.join(_KNOWN)}")
    return ServePlan(
        draft_model=str(given.get("model", "")),
        gateway_config=json.dumps({key: given[key] for key in _OF_GATEWAY if key in given}),
        drafter_args=_flags(given, _OF_DRAFTER),
        verifier_args=_flags(given, _OF_VERIFIER),
        ignored=tuple(f"{key} of --speculative-config: {_IGNORED[key]}" for key in given if key in _IGNORED),
    )


def _flags(given: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, ...]:
    named = {f"--{key.replace('_', '-')}": given[key] for key in keys if key in given}
    return tuple(part for flag, value in named.items() for part in (flag, str(value)))
