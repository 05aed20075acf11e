"""vLLM's names that are taken here: the keys of `speculative_config`, by the service that each configures, and the
KV cache's types.

Not here: their valid values, which each service checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.shared.errors import ConfigError

# Name -> what it means here. vLLM's fp8 and int8 scale a whole tensor, its _per_token_head what is done here always.
KV_CACHE_DTYPES: Mapping[str, str] = {
    "auto": "auto",
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_per_token_head"), "fp8"),
    **dict.fromkeys(("int8", "int8_per_token_head"), "int8"),
}

OF_GATEWAY = ("method", "num_speculative_tokens", "token_tree")
OF_DRAFTER = (
    "enforce_eager",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)
OF_VERIFIER = ("rejection_sample_method",)
_AS_IT_IS = "no text depends on how a draft is stored and computed"
# They place, size or tune the draft; no output depends on them.
IGNORED = {
    "draft_tensor_parallel_size": "a draft runs in one process",
    "tensor_parallel_size": "a draft runs in one process",
    "max_model_len": "a draft follows the target up to its own limit",
    "code_revision": "code from a checkpoint is never run",
    "use_heterogeneous_vocab": "drafts of another vocabulary are always translated",
    "parallel_drafting": "a head drafts as its checkpoint says",
    "draft_sample_method": "it follows from the request's mode",
    **dict.fromkeys(("quantization", "kv_cache_dtype", "moe_backend", "attention_backend"), _AS_IT_IS),
    **dict.fromkeys(("draft_load_config", "disable_padded_drafter_batch", "use_local_argmax_reduction"), _AS_IT_IS),
}
KNOWN = ("model", *OF_GATEWAY, *OF_DRAFTER, *OF_VERIFIER, *IGNORED)
# key -> the flag to use where services are started one by one
FLAGS_ELSEWHERE = {
    "model": "the drafter's --draft-model",
    **{key: f"the drafter's --{key.replace('_', '-')}" for key in OF_DRAFTER},
    **{key: f"the verifier's --{key.replace('_', '-')}" for key in OF_VERIFIER},
}


def given_keys(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The keys that are set, with underscores. name: of the setting. Raises ConfigError for an unknown key."""
    given = {key.replace("-", "_"): value for key, value in raw.items() if value is not None}
    for key in given:
        if key not in KNOWN:
            raise ConfigError(f"{name}: {key} is not supported; known are {', '.join(KNOWN)}", param=key)
    return given
