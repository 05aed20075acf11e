"""Writes tiny transformers models as GGUF, changing what llama.cpp's converter changes.

Llama's query and key rows are reordered, Gemma's norms get 1 added, Llama 3's frequencies become divisors, experts are
stacked. `kind` gives the type of each matrix; gguf-py quantises them (Q4_K: random numbers).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

_TYPES = gguf.GGMLQuantizationType
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.*.gate_proj": "ffn_gate_exps",
    "mlp.experts.*.up_proj": "ffn_up_exps",
    "mlp.experts.*.down_proj": "ffn_down_exps",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.*.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.*.w3": "ffn_up_exps",
    "block_sparse_moe.experts.*.w2": "ffn_down_exps",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
VOCABULARY = ["<s>", "</s>", "<|im_end|>", *(chr(33 + place) for place in range(94)), '!"']


def write_gguf(
    folder: Path,
    out: Path,
    architecture: str,
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    other_kinds: dict[str, str] | None = None,
    pre: str = "qwen2",
) -> Path:
    """folder: a float32 checkpoint of the tiny vocabulary. metadata: values of the architecture's to add. other_kinds:
    part of GGUF's name of a matrix -> its type, where it is not `kind`. pre: how its tokenizer splits text."""
    config = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(out, architecture)
    _add_shape(writer, config, metadata or {})
    _add_tokenizer(writer, pre)
    for name, tensor in _with_stacked_experts(load_file(folder / "model.safetensors")).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _as_llama_cpp(name, tensor, architecture, config)
        gguf_name = _gguf_name(name, architecture)
        own = next((other for part, other in (other_kinds or {}).items() if part in gguf_name), kind)
        is_vector_or_router = values.ndim == 1 or "ffn_gate_inp" in gguf_name
        wanted = _TYPES.F32 if is_vector_or_router else _TYPES[own]
        stored = _random_q4_k(values) if wanted == _TYPES.Q4_K else gguf.quants.quantize(values, wanted)
        writer.add_tensor(gguf_name, stored, raw_dtype=wanted)
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(rope, config.head_dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _random_q4_k(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Random weights of that shape, about 0 and below 0.5: gguf-py cannot quantise to this type."""
    outputs, inputs = values.shape
    blocks = np.random.default_rng(inputs).integers(0, 256, (outputs, inputs // 256, 144), dtype=np.uint8)
    blocks[..., :4] = np.array([0.0005, 0.00375], np.float16).view(np.uint8)  # of scales, of minimums
    return blocks.reshape(outputs, -1)


def _with_stacked_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of all experts under one name, with * for their numbers."""
    found: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors):  # fewer than ten experts
        found.setdefault(re.sub(r"experts\.\d\.", "experts.*.", name), []).append(tensors[name])
    return {name: torch.stack(parts) if "*" in name else parts[0] for name, parts in found.items()}


def _gguf_name(name: str, architecture: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    is_gemma_norm = architecture == "gemma3" and part == "post_attention_layernorm"
    return f"blk.{layer}.{'post_attention_norm' if is_gemma_norm else _NAMES[part]}.{kind}"


def _as_llama_cpp(name: str, tensor: torch.Tensor, architecture: str, config: Any) -> np.ndarray[Any, Any]:
    values = tensor.numpy()
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if architecture == "gemma3" and "norm" in name:
        values = values + 1
    return np.ascontiguousarray(values)


def _divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """One by one, as in the paper's appendix and llama.cpp's converter."""
    divisors = []
    for place in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * place / head_dim)
        original = rope["original_max_position_embeddings"]
        if wavelength < original / rope["high_freq_factor"]:
            divisors.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            divisors.append(rope["factor"])
        else:
            span = rope["high_freq_factor"] - rope["low_freq_factor"]
            smooth = (original / wavelength - rope["low_freq_factor"]) / span
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)


def _add_shape(writer: Any, config: Any, metadata: dict[str, Any]) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    for key, value in metadata.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(key, value)


def _add_tokenizer(writer: Any, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3, 3, *(1 for _ in VOCABULARY[3:])])
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
