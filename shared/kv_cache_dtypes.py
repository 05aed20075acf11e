"""The names of the KV cache's types, as vLLM has them: for settings and commands, without torch."""

from __future__ import annotations

from collections.abc import Mapping

# name -> format here. vLLM's fp8 and int8 scale a whole tensor; here scales are always per token and head, as in vLLM's
# _per_token_head.
KV_CACHE_DTYPES: Mapping[str, str] = {
    "auto": "auto",
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_per_token_head"), "fp8"),
    **dict.fromkeys(("int8", "int8_per_token_head"), "int8"),
}
