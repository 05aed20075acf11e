"""Tiny seeded random checkpoints of every architecture that is served, and of some that are refused.

Widths are deliberately no multiples of a vector (100, 36, heads of 20): that is where scalar tails and odd tiles live.
Windows and chunks (5, 7) are shorter than the sequences of the tests.
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
_OPT_LIKE = {"hidden_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
_STABLELM_2 = {"qk_layernorm": True, "use_qkv_bias": True, "use_parallel_residual": True}
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
    # Complex rotary embeddings, latent attention.
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **_LLAMA_LIKE,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 36,
        },
    ),
    # Queries are scaled by their position, from position 8 on.
    "ministral3": (
        "Ministral3Config",
        {
            **_LLAMA_LIKE,
            "head_dim": 20,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    # Norms of queries and keys without weights.
    "nanochat": ("NanoChatConfig", _LLAMA_LIKE),
    # Sigmoids that are functions: of a router, a shared expert's gate, attention's output.
    "minimax_m2": ("MiniMaxM2Config", {**_LLAMA_LIKE, **_MOE, "head_dim": 20}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **_LLAMA_LIKE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 36,
            "shared_expert_intermediate_size": 36,
        },
    ),
    # Chunks, queries scaled by their position from position 8 on, experts whose inputs are scaled.
    "llama4": (
        "Llama4TextConfig",
        {
            **_LLAMA_LIKE,
            **_MOE,
            "head_dim": 20,
            "intermediate_size": 36,
            "intermediate_size_mlp": 100,
            "no_rope_layers": [1, 0],
            "moe_layers": [0],
            "attention_chunk_size": 7,
            "floor_scale": 8,
            "attn_scale": 0.5,
        },
    ),
    "afmoe": (
        "AfmoeConfig",
        {
            **_LLAMA_LIKE,
            "head_dim": 20,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "moe_intermediate_size": 36,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    # Attention that is not transformers' interface's, or drops arguments before it (own_attention).
    "stablelm": ("StableLmConfig", {**_LLAMA_LIKE, "partial_rotary_factor": 0.5}),
    "stablelm_2": ("StableLmConfig", {**_LLAMA_LIKE, "partial_rotary_factor": 0.5, **_STABLELM_2}),
    "nemotron": ("NemotronConfig", {**_LLAMA_LIKE, "partial_rotary_factor": 0.5}),
    "biogpt": ("BioGptConfig", {**_COMMON, **_OPT_LIKE, "intermediate_size": 100}),
    "gptj": ("GPTJConfig", {**_GPT2_LIKE, "rotary_dim": 4}),
    "codegen": ("CodeGenConfig", {**_GPT2_LIKE, "rotary_dim": 4}),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            **_COMMON,
            "hidden_size": 80,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 7,
        },
    ),
    # Falcon 7B's layout, 40B's and RW's.
    "falcon": ("FalconConfig", {**_COMMON, **_OPT_LIKE}),
    "falcon_40b": (
        "FalconConfig",
        {**_COMMON, **_OPT_LIKE, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "falcon_rw": (
        "FalconConfig",
        {**_COMMON, **_OPT_LIKE, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    ),
    "bloom": ("BloomConfig", {**_COMMON, "hidden_size": 80, "n_layer": 2, "n_head": 4, "pretraining_tp": 2}),
    "mpt": (
        "MptConfig",
        {**_COMMON, "d_model": 80, "n_layers": 2, "n_heads": 5, "max_seq_len": 128, "attn_config": {"clip_qkv": 1.5}},
    ),
}

# Recurrent layers before, between and after attention; their forwards need states (tests/engine/recurrent).
_HYBRID = {
    **_LLAMA_LIKE,
    "head_dim": 20,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
}
_HYBRID_MOE = {
    **_HYBRID,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
    "shared_expert_intermediate_size": 36,
}
_MAMBA2 = {
    **_LLAMA_LIKE,
    "hidden_size": 72,
    "num_hidden_layers": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 6,
    "mamba_d_head": 24,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
}
_MAMBA = {**_COMMON, "hidden_size": 72, "num_hidden_layers": 3, "expand": 2}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", _HYBRID),
    "qwen3_next": ("Qwen3NextConfig", _HYBRID_MOE),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", _HYBRID_MOE),
    "bamba": ("BambaConfig", {**_MAMBA2, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_MAMBA2,
            **_MOE,
            "intermediate_size": 36,
            "shared_intermediate_size": 52,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **_LLAMA_LIKE,
            "head_dim": 20,
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention", "moe"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 24,
            "n_groups": 2,
            "ssm_state_size": 20,
            # transformers raises smaller time steps to it, in prompts alone; its initial ones are at the default.
            "time_step_min": 1e-6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 36,
            "moe_shared_expert_intermediate_size": 52,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            **_MAMBA2,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 144,
            "mamba_rms_norm": True,
            "ssm_in_multiplier": 0.7,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.6],
        },
    ),
    # No norm before the output projection.
    "falcon_h1_gate": (
        "FalconH1Config",
        {**_MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": 144, "mamba_rms_norm": False, "ssm_out_multiplier": 0.7},
    ),
    "lfm2": (
        "Lfm2Config",
        {
            **_LLAMA_LIKE,
            "num_hidden_layers": 4,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **_LLAMA_LIKE,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "moe_intermediate_size": 36,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
        },
    ),
    # Its layers do not pass their arguments on.
    "jamba": (
        "JambaConfig",
        {
            **_LLAMA_LIKE,
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 12,
            "mamba_dt_rank": 10,
        },
    ),
    # No attention at all.
    "mamba": ("MambaConfig", {**_MAMBA, "state_size": 12, "time_step_rank": 10}),
    "falcon_mamba": ("FalconMambaConfig", {**_MAMBA, "state_size": 12, "time_step_rank": 10, "use_bias": True}),
    "mamba2": ("Mamba2Config", {**_MAMBA, "num_heads": 6, "head_dim": 24, "n_groups": 2, "state_size": 20}),
    # Attention modules that share their weights, and an MLP after each.
    "zamba2": (
        "Zamba2Config",
        {
            **_LLAMA_LIKE,
            "hidden_size": 72,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "mamba_d_state": 20,
            "n_mamba_heads": 6,
            "mamba_ngroups": 2,
            "num_key_value_heads": 4,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
            "use_mem_rope": True,
            "time_step_min": 1e-6,
        },
    ),
    "olmo_hybrid": ("OlmoHybridConfig", {**_HYBRID, "linear_allow_neg_eigval": True}),
    "bailing_hybrid": (
        "BailingHybridConfig",
        {
            **_LLAMA_LIKE,
            **_MOE,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "head_dim": 20,
            "moe_intermediate_size": 36,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **_LLAMA_LIKE,
            **_MOE,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "linear_head_dim": 20,
            "linear_num_heads": 3,
            "moe_intermediate_size": 36,
        },
    ),
}

# None of these routes its attention through transformers' interface.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "xglm": ("XGLMConfig", {**_COMMON, "d_model": 80, "ffn_dim": 100, "num_layers": 2, "attention_heads": 4}),
    "openai-gpt": ("OpenAIGPTConfig", _GPT2_LIKE),
    "gpt_neox_japanese": (
        "GPTNeoXJapaneseConfig",
        {**_COMMON, "hidden_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4},
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
