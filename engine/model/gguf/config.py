"""The config of each architecture that is read from GGUF, from the file's own metadata and tensors.

Every value of the architecture's is read, or the file is refused: what is left out silently gives wrong logits. The
rules are those of llama.cpp (conversion, src/llama-model.cpp, src/models). One function per architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.engine.errors import ModelRefused
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.mixtures import deepseek2, gpt_oss, latent_heads, qwen2moe
from outrider.engine.model.gguf.rope import longrope_parameters, rope_parameters

# Gemma 2's values where a file leaves them out; layers of the 27B (llama.cpp, src/models/gemma2.cpp).
_GEMMA2_WINDOW, _GEMMA2_ATTENTION_CAP, _GEMMA2_LOGIT_CAP = 4096, 50.0, 30.0
_GEMMA2_27B_LAYERS = 46
# tokens; context and window of Phi-3's short versions, whose older files leave the window out (their config.json).
_PHI3_SHORT_CONTEXT, _PHI3_SHORT_WINDOW = 4096, 2047
# Gemma 3: every sixth layer attends to all positions; base of the frequencies of the others; layers of the 27B.
_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_BASE = 10000.0
_GEMMA3_27B_LAYERS = 62
_EXACT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Texts of control tokens that end a turn or a text, in files that name one end only (llama.cpp, src/llama-vocab.cpp).
_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
    "[EOT]",
    "[EOS]",
)
# Ends a turn (Phi-3), but only a part of one where there is another end of turns (gpt-oss).
_END, _END_AFTER_PARTS = "<|end|>", "<|return|>"
_CONTROL = 3


def model_config(file: GgufFile) -> dict[str, Any]:
    """What config.json says. Raises ModelRefused for architectures and settings that are not read."""
    rules = _ARCHITECTURES.get(file.architecture)
    if rules is None:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise ModelRefused(file.path, f"its architecture is {file.architecture!r}; of GGUF files, {known} are read")
    heads = _HEADS_OF.get(file.architecture, _heads)
    config = _common(file) | heads(file) | rules(file)
    if "num_experts_per_tok" not in config:
        file.require("expert_count", 0)
    file.require_all_read()
    return config | _types(file)


def eos_token_ids(file: GgufFile) -> list[int]:
    """Every token that ends a text or a turn."""
    found = {file.general(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    tokens, kinds = file.general("tokenizer.ggml.tokens", []), file.general("tokenizer.ggml.token_type", [])
    ends = _ENDS if _END_AFTER_PARTS in tokens else (*_ENDS, _END)
    found |= {index for index, kind in enumerate(kinds) if kind == _CONTROL and tokens[index] in ends}
    return sorted(found)


def _common(file: GgufFile) -> dict[str, Any]:
    vocab_size = int(file.tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in file.tensors else 0
    file.own("vocab_size", vocab_size)  # the embedding may be padded beyond it
    return {
        "hidden_size": file.own("embedding_length"),
        "intermediate_size": file.own("feed_forward_length"),
        "num_hidden_layers": file.own("block_count"),
        "rms_norm_eps": file.own("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": file.own("context_length"),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.general("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.general("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.general("tokenizer.ggml.padding_token_id"),
    }


def _heads(file: GgufFile) -> dict[str, Any]:
    num_heads = file.own("attention.head_count")
    head_dim = file.own("attention.key_length", file.own("embedding_length") // num_heads)
    file.require("attention.value_length", head_dim)
    file.require("rope.dimension_count", head_dim)
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.own("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rope_parameters": rope_parameters(file),
    }


def _llama(file: GgufFile) -> dict[str, Any]:
    if file.own("expert_count", 0):
        return _mixtral(file)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _mixtral(file: GgufFile) -> dict[str, Any]:
    if "blk.0.attn_q.bias" in file.tensors:
        raise ModelRefused(file.path, "it has experts and biases of attention, and Mixtral has none")
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": file.own("expert_count"),
        "num_experts_per_tok": file.own("expert_used_count"),
        "sliding_window": None,
    }


def _qwen2(file: GgufFile) -> dict[str, Any]:
    return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}


def _qwen3(file: GgufFile) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_sliding_window": False,
    }


def _qwen3moe(file: GgufFile) -> dict[str, Any]:
    """llama.cpp makes the chosen experts' weights add up to 1, whatever the checkpoint's norm_topk_prob was."""
    return _qwen3(file) | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": file.own("expert_count"),
        "num_experts_per_tok": file.own("expert_used_count"),
        "moe_intermediate_size": file.own("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _granite(file: GgufFile) -> dict[str, Any]:
    return _llama(file) | {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": file.own("attention.scale"),
        "embedding_multiplier": file.own("embedding_scale"),
        "residual_multiplier": file.own("residual_scale"),
        "logits_scaling": file.own("logit_scale"),
    }


def _olmo2(file: GgufFile) -> dict[str, Any]:
    """OLMo 3, whose layers have windows, has the same name in llama.cpp; its attention.sliding_window is not read."""
    return {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "attention_bias": False}


def _gemma2(file: GgufFile) -> dict[str, Any]:
    """Layers with a window and without take turns, the first has one."""
    num_layers, head_dim = file.own("block_count"), file.own("attention.key_length")
    kinds = ("sliding_attention", "full_attention")
    file.require("attention.sliding_window_pattern", len(kinds))
    file.require("rope.freq_base_swa", file.own("rope.freq_base", 10000.0))
    by_width = file.own("embedding_length") // file.own("attention.head_count")
    return {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": file.own("attention.sliding_window", _GEMMA2_WINDOW),
        "layer_types": [kinds[layer % len(kinds)] for layer in range(num_layers)],
        "query_pre_attn_scalar": by_width if num_layers == _GEMMA2_27B_LAYERS else head_dim,
        "attn_logit_softcapping": file.own("attn_logit_softcapping", _GEMMA2_ATTENTION_CAP),
        "final_logit_softcapping": file.own("final_logit_softcapping", _GEMMA2_LOGIT_CAP),
    }


def _phi3_heads(file: GgufFile) -> dict[str, Any]:
    """A head may be rotated in part (Phi-4-mini)."""
    num_heads = file.own("attention.head_count")
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.own("attention.head_count_kv", num_heads),
        "original_max_position_embeddings": file.own(
            "rope.scaling.original_context_length", file.own("context_length")
        ),
        "rope_parameters": longrope_parameters(file, file.own("embedding_length") // num_heads),
    }


def _phi3(file: GgufFile) -> dict[str, Any]:
    """A window of 0 is none. llama.cpp leaves the windows out; the checkpoints, and so this, do not."""
    is_short = file.own("context_length") == _PHI3_SHORT_CONTEXT
    return {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": file.own("attention.sliding_window", _PHI3_SHORT_WINDOW if is_short else 0) or None,
    }


def _gemma3(file: GgufFile) -> dict[str, Any]:
    common_rope, num_layers = rope_parameters(file), file.own("block_count")
    hidden_size, num_heads = file.own("embedding_length"), file.own("attention.head_count")
    head_dim = file.own("attention.key_length")
    kinds = ("sliding_attention", "full_attention")
    local_base = file.own("rope.freq_base_swa", _GEMMA3_LOCAL_BASE)
    file.require("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": file.own("attention.sliding_window"),
        "layer_types": [kinds[(layer + 1) % _GEMMA3_PATTERN == 0] for layer in range(num_layers)],
        "query_pre_attn_scalar": hidden_size // num_heads if num_layers == _GEMMA3_27B_LAYERS else head_dim,
        "rope_parameters": {
            "full_attention": common_rope,
            "sliding_attention": {"rope_theta": local_base, "rope_type": "default"},
        },
    }


def _types(file: GgufFile) -> dict[str, Any]:
    """The dtype of matrices that are stored whole; else the types, as of any quantised checkpoint."""
    types = {tensor.tensor_type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if len(types) == 1 and types <= _EXACT_TYPES.keys():
        return {"dtype": _EXACT_TYPES[types.pop()]}
    return {"dtype": "bfloat16", "quantization_config": {"quant_method": "gguf", "types": sorted(types)}}


_ARCHITECTURES: dict[str, Callable[[GgufFile], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "qwen2moe": qwen2moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": gpt_oss,
    "deepseek2": deepseek2,
    "granite": _granite,
    "olmo2": _olmo2,
    "phi3": _phi3,
}
# Of those whose heads have more to say than a width.
_HEADS_OF: dict[str, Callable[[GgufFile], dict[str, Any]]] = {"deepseek2": latent_heads, "phi3": _phi3_heads}
