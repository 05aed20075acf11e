"""The config rules of Gemma 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engine.model.gguf.family import Family, Rules
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.rope import rope_parameters

# Gemma 2's values where a file leaves them out; layers of the 27B (llama.cpp, src/models/gemma2.cpp).
_GEMMA2_WINDOW, _GEMMA2_ATTENTION_CAP, _GEMMA2_LOGIT_CAP = 4096, 50.0, 30.0
_GEMMA2_27B_LAYERS = 46
# Gemma 3: every sixth layer attends to all positions; base of the frequencies of the others; layers of the 27B.
_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_BASE = 10000.0
_GEMMA3_27B_LAYERS = 62
_KINDS = ("sliding_attention", "full_attention")
_ACTIVATION = {"hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(file: GgufFile) -> dict[str, Any]:
    """Layers with a window and without take turns, the first has one."""
    num_layers, head_dim = file.own("block_count"), file.own("attention.key_length")
    file.require("attention.sliding_window_pattern", len(_KINDS))
    file.require("rope.freq_base_swa", file.own("rope.freq_base", 10000.0))
    by_width = file.own("embedding_length") // file.own("attention.head_count")
    return {
        "layer_types": [_KINDS[layer % len(_KINDS)] for layer in range(num_layers)],
        "query_pre_attn_scalar": by_width if num_layers == _GEMMA2_27B_LAYERS else head_dim,
    }


def _gemma3(file: GgufFile) -> dict[str, Any]:
    common_rope, num_layers = rope_parameters(file), file.own("block_count")
    hidden_size, num_heads = file.own("embedding_length"), file.own("attention.head_count")
    head_dim = file.own("attention.key_length")
    local_base = file.own("rope.freq_base_swa", _GEMMA3_LOCAL_BASE)
    file.require("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    return {
        "layer_types": [_KINDS[(layer + 1) % _GEMMA3_PATTERN == 0] for layer in range(num_layers)],
        "query_pre_attn_scalar": hidden_size // num_heads if num_layers == _GEMMA3_27B_LAYERS else head_dim,
        "rope_parameters": {
            "full_attention": common_rope,
            "sliding_attention": {"rope_theta": local_base, "rope_type": "default"},
        },
    }


GEMMA: Mapping[str, Rules] = {
    "gemma": Family("gemma", "GemmaForCausalLM", fixed=_ACTIVATION),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        {
            "sliding_window": ("attention.sliding_window", _GEMMA2_WINDOW),
            "attn_logit_softcapping": ("attn_logit_softcapping", _GEMMA2_ATTENTION_CAP),
            "final_logit_softcapping": ("final_logit_softcapping", _GEMMA2_LOGIT_CAP),
        },
        _ACTIVATION,
        (_gemma2,),
    ),
    "gemma3": Family(
        "gemma3_text", "Gemma3ForCausalLM", {"sliding_window": "attention.sliding_window"}, _ACTIVATION, (_gemma3,)
    ),
}
