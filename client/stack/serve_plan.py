"""Splits vLLM's options and its `--speculative-config` into options of gateway, verifier and drafter.

Not here: valid values, which each service checks when it starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.shared.draft_policy.draft_methods import FROM_TARGET, without_lookup
from outrider.shared.speculative_config import json_object, parse_speculative_config
from outrider.shared.vllm_keys import IGNORED, OF_DRAFTER, OF_GATEWAY, OF_VERIFIER, given_keys


@dataclass(frozen=True)
class ServePlan:
    """The services' options that follow from a --speculative-config.

    gateway_config: the gateway's --speculative-config. ignored: the keys without effect, each with its reason.
    """

    draft_model: str
    gateway_config: str
    drafter_args: tuple[str, ...] = ()
    verifier_args: tuple[str, ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()


_VERIFIER_OPTIONS = (
    *("served_model_name", "max_model_len", "tensor_parallel_size", "enforce_eager", "max_num_seqs"),
    *("max_num_batched_tokens", "block_size", "enable_prefix_caching", "kv_cache_mb", "kv_cache_dtype"),
    *("gpu_memory_utilization", "allow_draft_loading", "allow_target_reload"),
    *("learn", "learn_share", "learn_checkpoints"),
    "otlp_traces_endpoint",
)
_GATEWAY_OPTIONS = (
    *("served_model_name", "chat_template", "tool_call_parser", "reasoning_parser", "per_request_spec_decode_metrics"),
    *("return_tokens_as_token_ids", "enable_force_include_usage", "enable_tokenizer_info_endpoint", "api_docs"),
    *("otlp_traces_endpoint", "allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
)


def service_args(given: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Arguments of the verifier and of the gateway, of options of `vllm serve` by the services' names."""
    return _flags(given, _VERIFIER_OPTIONS), _flags(given, _GATEWAY_OPTIONS)


def plan_serving(speculative_config: str, target: str = "") -> ServePlan:
    """Plans the services' options. Raises ConfigError that names the key.

    speculative_config empty: no speculation, as in vLLM. target: the target's name in the command line.
    """
    if not speculative_config:
        return ServePlan("", '{"method": "off"}')
    given = given_keys(json_object(speculative_config), "--speculative-config")
    gateway_config = json.dumps({key: given[key] for key in OF_GATEWAY if key in given})
    method = parse_speculative_config(gateway_config).method
    draft_model = str(given.get("model", ""))
    if without_lookup(method) in FROM_TARGET and draft_model == target:
        draft_model = ""
    return ServePlan(
        draft_model=draft_model,
        gateway_config=gateway_config,
        drafter_args=_flags(given, OF_DRAFTER),
        verifier_args=_flags(given, OF_VERIFIER),
        ignored=tuple((f"--speculative-config.{key}", IGNORED[key]) for key in given if key in IGNORED),
    )


def _flags(given: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, ...]:
    named = {f"--{key.replace('_', '-')}": given[key] for key in keys if key in given}
    return tuple(part for flag, value in named.items() for part in (flag, str(value)))
