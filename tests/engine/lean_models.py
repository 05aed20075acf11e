"""Tiny models whose widths are multiples of vectors, so that all lean stand-ins an architecture allows are used."""

from __future__ import annotations

from typing import Any

from tiny_models import SERVED

_LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_GPT2_LIKE: dict[str, Any] = {"n_embd": 128, "n_inner": 96}
_WITH_HEAD_DIM = {"head_dim": 32}
_OWN: dict[str, dict[str, Any]] = {
    "opt": {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 96},
    "gpt_neox": {"hidden_size": 128, "intermediate_size": 96},
    "gpt2": _GPT2_LIKE,
    "gpt_bigcode": _GPT2_LIKE,
    "gpt_oss": {**_LLAMA_LIKE, **_WITH_HEAD_DIM, "intermediate_size": 32},
    "llama4": {**_LLAMA_LIKE, "intermediate_size": 32, "intermediate_size_mlp": 96},
    "deepseek_v2": {**_LLAMA_LIKE, "num_key_value_heads": 4},
    # Half of 64 elements rotate.
    "phi": {**_LLAMA_LIKE, "hidden_size": 256, "partial_rotary_factor": 0.5},
}


def _wider(name: str) -> tuple[str, dict[str, Any]]:
    config_name, arguments = SERVED[name]
    changes = dict(_OWN.get(name, _LLAMA_LIKE))
    if "head_dim" in arguments:
        changes |= _WITH_HEAD_DIM
    return config_name, {**arguments, **changes}


# Names as in SERVED with "lean_" before; gpt2, gpt_bigcode and opt have nothing that a stand-in could replace.
LEAN_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    f"lean_{name}": _wider(name) for name in SERVED if name not in ("gpt2", "gpt_bigcode", "opt")
}
