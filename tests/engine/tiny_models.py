"""Tiny seeded random checkpoints of every architecture that is served, and of some that are refused.

Widths are deliberately no multiples of a vector (100, 36, heads of 20): that is where scalar tails and odd tiles live.
Windows (5, 7) are shorter than the sequences of the tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 101
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA_LIKE = {
    **_COMMON,
    "hidden_size": 80,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# For the GPU's kernels, which take their time when they are interpreted.
TINY_LLAMA = {
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "n_positions": 128,
    "n_embd": 80,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 100,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}

# name -> (config class, arguments)
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _LLAMA_LIKE),
    "llama_tied": ("LlamaConfig", {**_LLAMA_LIKE, "tie_word_embeddings": True, "attention_bias": True}),
    "mistral": ("MistralConfig", {**_LLAMA_LIKE, "head_dim": 20, "sliding_window": 7}),
    "mixtral": ("MixtralConfig", {**_LLAMA_LIKE, **_MOE, "head_dim": 20, "sliding_window": 7}),
    "phi": ("PhiConfig", {**_LLAMA_LIKE, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3Config", {**_LLAMA_LIKE, "sliding_window": 5}),
    "qwen2": (
        "Qwen2Config",
        {
            **_LLAMA_LIKE,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("Qwen3Config", {**_LLAMA_LIKE, "head_dim": 20}),
    "opt": (
        "OPTConfig",
        {
            **_COMMON,
            "hidden_size": 80,
            "word_embed_proj_dim": 80,
            "ffn_dim": 100,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            **_LLAMA_LIKE,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "gpt2": ("GPT2Config", _GPT2_LIKE),
    "gemma2": (
        "Gemma2Config",
        {**_LLAMA_LIKE, "head_dim": 20, "sliding_window": 7, "query_pre_attn_scalar": 20},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_LLAMA_LIKE,
            "head_dim": 20,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 36,
            "norm_topk_prob": True,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {**_LLAMA_LIKE, "head_dim": 20, "sliding_window": 7, "query_pre_attn_scalar": 20},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**_LLAMA_LIKE, **_MOE, "head_dim": 20, "intermediate_size": 36, "sliding_window": 7},
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        {
            **_COMMON,
            "hidden_size": 80,
            "intermediate_size": 100,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    ),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT2_LIKE),
    "starcoder2": ("Starcoder2Config", {**_LLAMA_LIKE, "sliding_window": 7}),
    "olmo2": ("Olmo2Config", _LLAMA_LIKE),
    "smollm3": ("SmolLM3Config", {**_LLAMA_LIKE, "no_rope_layers": [1, 0]}),
    "cohere": ("CohereConfig", {**_LLAMA_LIKE, "use_qk_norm": True}),
    "granitemoe": ("GraniteMoeConfig", {**_LLAMA_LIKE, **_MOE}),
    "phimoe": ("PhimoeConfig", {**_LLAMA_LIKE, **_MOE}),
}

# None of these routes its attention through transformers' interface.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": (
        "FalconConfig",
        {**_COMMON, "hidden_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "gptj": ("GPTJConfig", {**_GPT2_LIKE, "rotary_dim": 4}),
    "bloom": ("BloomConfig", {"vocab_size": VOCAB_SIZE, "hidden_size": 80, "n_layer": 2, "n_head": 4}),
    "codegen": ("CodeGenConfig", {**_GPT2_LIKE, "rotary_dim": 4}),
    "stablelm": ("StableLmConfig", {**_LLAMA_LIKE, "partial_rotary_factor": 0.5}),
    "mpt": ("MptConfig", {"vocab_size": VOCAB_SIZE, "d_model": 80, "n_layers": 2, "n_heads": 4}),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 80,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}


def save_tiny_model(config_name: str, arguments: dict[str, Any], directory: Path, seed: int = 0) -> Path:
    """Write a random float32 checkpoint; every weight, biases and norms too, gets a random value."""
    config = getattr(transformers, config_name)(**arguments)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(directory)
    return directory
