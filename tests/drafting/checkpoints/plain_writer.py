"""Draft checkpoints in every public layout, with random numbers, written by hand from the format descriptions.

Imports nothing of drafter_service: what the loaders must read is said here a second time.
Small odd sizes: hidden 24, 3 query heads over 1 key-value head of 8, target vocabulary 37.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 24, 40, 3, 1, 8
VOCAB, DRAFT_VOCAB, NUM_TARGET_LAYERS = 37, 11, 6

Tensors = dict[str, torch.Tensor]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers of about the size that weights have; norm weights lie around one."""
    generator = torch.Generator().manual_seed(seed + 7919 * sum(place * size for place, size in enumerate(shape, 1)))
    noise = torch.randn(shape, generator=generator)
    return 1 + 0.1 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5


def write(folder: Path, config: Any, tensors: Mapping[str, torch.Tensor], file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".bin"):
        torch.save(dict(tensors), folder / file)
    else:
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / file)
    return folder


def write_sharded(folder: Path, config: Any, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Two shards and an index."""
    names = sorted(tensors)
    files = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(names)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for file in set(files.values()):
        save_file({name: tensors[name].contiguous().clone() for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


# --- targets -------------------------------------------------------------------------------------------------------


def llama_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": NUM_TARGET_LAYERS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    } | changes


def target_tensors() -> Tensors:
    """The two matrices of a llama target, and one tensor that must not be read."""
    return {
        "model.embed_tokens.weight": numbers(VOCAB, HIDDEN, seed=101),
        "lm_head.weight": numbers(VOCAB, HIDDEN, seed=102),
        "model.norm.weight": torch.full((HIDDEN,), float("nan")),
    }


# --- decoder layers ------------------------------------------------------------------------------------------------


def layer_tensors(prefix: str, num_inputs: int = HIDDEN, seed: int = 0, *, qkv_bias: bool = False) -> Tensors:
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors = {
        "self_attn.q_proj.weight": numbers(query, num_inputs, seed=seed + 1),
        "self_attn.k_proj.weight": numbers(key, num_inputs, seed=seed + 2),
        "self_attn.v_proj.weight": numbers(key, num_inputs, seed=seed + 3),
        "self_attn.o_proj.weight": numbers(HIDDEN, query, seed=seed + 4),
        "mlp.gate_proj.weight": numbers(INTERMEDIATE, HIDDEN, seed=seed + 5),
        "mlp.up_proj.weight": numbers(INTERMEDIATE, HIDDEN, seed=seed + 6),
        "mlp.down_proj.weight": numbers(HIDDEN, INTERMEDIATE, seed=seed + 7),
        "post_attention_layernorm.weight": numbers(HIDDEN, seed=seed + 8),
    }
    if qkv_bias:
        for name, size in (("q", query), ("k", key), ("v", key)):
            tensors[f"self_attn.{name}_proj.bias"] = numbers(size, seed=seed + 9)
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def eagle1_tensors(*, num_layers: int = 1, fc_bias: bool = True, qkv_bias: bool = False) -> Tensors:
    tensors = {"fc.weight": numbers(HIDDEN, 2 * HIDDEN, seed=20)} | layer_tensors("layers.0", qkv_bias=qkv_bias)
    if fc_bias:
        tensors["fc.bias"] = numbers(HIDDEN, seed=21)
    for index in range(1, num_layers):
        tensors |= layer_tensors(f"layers.{index}", seed=100 * index, qkv_bias=qkv_bias)
        tensors[f"layers.{index}.input_layernorm.weight"] = numbers(HIDDEN, seed=22)
    return tensors


LATENT, QUERY_LATENT, KEY_DIM, ROTATED, VALUE_DIM = 16, 14, 12, 8, 16  # 16 is the least that the CPU kernel takes


def latent_sizes(**changes: Any) -> dict[str, Any]:
    """Settings of latent attention, by the names that both DeepSeek and Mistral have."""
    sizes = {"kv_lora_rank": LATENT, "q_lora_rank": QUERY_LATENT, "v_head_dim": VALUE_DIM}
    return sizes | {"qk_nope_head_dim": KEY_DIM, "qk_rope_head_dim": ROTATED} | changes


def with_latents(tensors: Tensors, *, has_query_latent: bool = True) -> Tensors:
    """The same layers with latent attention, as DeepSeek's."""
    found = {name: part for name, part in tensors.items() if ".self_attn." not in name}
    for name in [name for name in tensors if name.endswith(".self_attn.q_proj.weight")]:
        attention, inputs = name.removesuffix("q_proj.weight"), tensors[name].shape[1]
        queries = HEADS * (KEY_DIM + ROTATED)
        shapes = {
            "kv_a_proj_with_mqa": (LATENT + ROTATED, inputs),
            "kv_a_layernorm": (LATENT,),
            "kv_b_proj": (HEADS * (KEY_DIM + VALUE_DIM), LATENT),
            "o_proj": (HIDDEN, HEADS * VALUE_DIM),
        }
        if has_query_latent:
            shapes |= {"q_a_proj": (QUERY_LATENT, inputs), "q_a_layernorm": (QUERY_LATENT,)}
        shapes |= {"q_b_proj": (queries, QUERY_LATENT)} if has_query_latent else {"q_proj": (queries, inputs)}
        found |= {
            f"{attention}{part}.weight": numbers(*shape, seed=200 + place)
            for place, (part, shape) in enumerate(shapes.items())
        }
    return found


def mistral_eagle_tensors() -> Tensors:
    """As eagle1_tensors, with Mistral's norms."""
    norms = {"norm.weight": numbers(HIDDEN, seed=23), "layers.0.input_layernorm.weight": numbers(HIDDEN, seed=24)}
    return eagle1_tensors(fc_bias=False) | norms


def mistral_params(**changes: Any) -> dict[str, Any]:
    return {
        "dim": HIDDEN,
        "n_layers": 1,
        "head_dim": HEAD_DIM,
        "hidden_dim": INTERMEDIATE,
        "n_heads": HEADS,
        "n_kv_heads": KV_HEADS,
        "norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
    } | changes


def write_mistral(folder: Path, params: Any, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Mistral's own layout, of tensors with the names that other heads have."""
    names = {
        "fc": "eagle_linear",
        "self_attn": "attention",
        **{f"{part}_proj": f"w{part}" for part in ("q", "k", "v", "o", "q_a", "q_b", "kv_b")},
        "kv_a_proj_with_mqa": "wkv_a_with_mqa",
        "q_a_layernorm": "q_a_norm",
        "kv_a_layernorm": "kv_a_norm",
        "mlp": "feed_forward",
        "gate_proj": "w1",
        "down_proj": "w2",
        "up_proj": "w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    named = {".".join(names.get(part, part) for part in name.split(".")): part for name, part in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params))
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in named.items()}, folder / "consolidated.safetensors"
    )
    return folder


def eagle3_tensors(*, layer: str = "layers.0", num_aux: int = 3, draft_vocab: int = DRAFT_VOCAB) -> Tensors:
    tensors = layer_tensors(layer, 2 * HIDDEN) | {
        f"{layer}.input_layernorm.weight": numbers(HIDDEN, seed=30),
        f"{layer}.hidden_norm.weight": numbers(HIDDEN, seed=31),
        "fc.weight": numbers(HIDDEN, num_aux * HIDDEN, seed=32),
        "norm.weight": numbers(HIDDEN, seed=33),
        "lm_head.weight": numbers(draft_vocab, HIDDEN, seed=34),
    }
    if draft_vocab < VOCAB:
        tensors |= vocabulary_maps(draft_vocab)
    return tensors


def vocabulary_maps(draft_vocab: int = DRAFT_VOCAB) -> Tensors:
    """Draft id i is target id 3 i."""
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[3 * torch.arange(draft_vocab)] = True
    return {"d2t": 2 * torch.arange(draft_vocab), "t2d": t2d}


def eagle1_config(**changes: Any) -> dict[str, Any]:
    return llama_config(num_hidden_layers=1) | changes


def eagle3_config(**changes: Any) -> dict[str, Any]:
    """SafeAILab and SpecForge."""
    raw = llama_config(architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, draft_vocab_size=DRAFT_VOCAB)
    return raw | changes


def speculators_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": llama_config(num_hidden_layers=1),
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": None,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": None,
    } | changes


def modelopt_config(**changes: Any) -> dict[str, Any]:
    block = {
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }
    return eagle3_config(eagle_config=block | changes)


# --- medusa and mlp speculator ---------------------------------------------------------------------------------------


def medusa_block(head: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of one residual block."""
    seed = 40 + 10 * head + layer
    return numbers(HIDDEN, HIDDEN, seed=seed), numbers(HIDDEN, seed=seed)


def medusa_lm_head(head: int, rows: int = VOCAB) -> torch.Tensor:
    return numbers(rows, HIDDEN, seed=80 + head)


def medusa_vllm_tensors(
    num_heads: int, num_layers: int, *, has_bias: bool = False, prefix: str = "", rows: int = VOCAB
) -> Tensors:
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            weight, bias = medusa_block(head, layer)
            tensors[f"{prefix}blocks.{head}.layers.{layer}.weight"] = weight
            if has_bias:
                tensors[f"{prefix}blocks.{head}.layers.{layer}.bias"] = bias
        tensors[f"{prefix}lm_heads.{head}.weight"] = medusa_lm_head(head, rows)
    return tensors


def medusa_original_tensors(num_heads: int, num_layers: int, *, prefix: str = "") -> Tensors:
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            weight, bias = medusa_block(head, layer)
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = weight
            tensors[f"{prefix}{head}.{layer}.linear.bias"] = bias
        tensors[f"{prefix}{head}.{num_layers}.weight"] = medusa_lm_head(head)
    return tensors


def medusa_config(num_heads: int, num_layers: int, **changes: Any) -> dict[str, Any]:
    """vLLM's."""
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_heads": num_heads,
        "num_hidden_layers": num_layers,
        "max_paths": 64,
        "topk": 10,
        "truncated_vocab_size": None,
    } | changes


def mlp_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": VOCAB,
        "emb_dim": HIDDEN,
        "inner_dim": 20,
        "n_predict": 3,
        "n_candidates": 5,
        "top_k_tokens_per_head": [5, 4, 3],
        "tie_weights": False,
        "scale_input": True,
    } | changes


def mlp_tensors(inner: int = 20, n_predict: int = 3, *, is_tied: bool = False) -> Tensors:
    """Without the prefix `speculator.`; tied: only the distinct ones."""
    tensors = {}
    for index in range(1 if is_tied else n_predict):
        tensors[f"emb.{index}.weight"] = numbers(VOCAB, inner, seed=60 + index)
        tensors[f"ln.{index}.weight"] = numbers(inner, seed=61 + index)
        tensors[f"ln.{index}.bias"] = numbers(inner, seed=64 + index) - 1
        tensors[f"head.{index}.weight"] = numbers(VOCAB, inner, seed=70 + index)
    for index in range(min(2, n_predict) if is_tied else n_predict):
        tensors[f"proj.{index}.weight"] = numbers(inner, HIDDEN if index == 0 else inner, seed=75 + index)
    return tensors


def prefixed(tensors: Tensors, prefix: str) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


# --- one-pass block heads ------------------------------------------------------------------------------------------

MASK_TOKEN, BLOCK_SIZE, MARKOV_RANK = 5, 4, 6


def block_tensors(*, num_layers: int = 1, num_states: int = 3) -> Tensors:
    """z-lab's names: no embedding and no output head, which are the target's."""
    tensors = {
        "fc.weight": numbers(HIDDEN, num_states * HIDDEN, seed=60),
        "hidden_norm.weight": numbers(HIDDEN, seed=61),
        "norm.weight": numbers(HIDDEN, seed=62),
    }
    for index in range(num_layers):
        prefix = f"layers.{index}"
        tensors |= layer_tensors(prefix, seed=100 * index) | {
            f"{prefix}.input_layernorm.weight": numbers(HIDDEN, seed=63 + index),
            f"{prefix}.self_attn.q_norm.weight": numbers(HEAD_DIM, seed=65 + index),
            f"{prefix}.self_attn.k_norm.weight": numbers(HEAD_DIM, seed=67 + index),
        }
    return tensors


def markov_tensors(kind: str = "vanilla", draft_vocab: int = VOCAB) -> Tensors:
    """With a confidence head, as published."""
    rank = MARKOV_RANK
    tensors = {
        "markov_head.markov_w1.weight": numbers(VOCAB, rank, seed=70),
        "markov_head.markov_w2.weight": numbers(draft_vocab, rank, seed=71),
        "confidence_head.proj.weight": numbers(1, HIDDEN + rank, seed=72),
        "confidence_head.proj.bias": numbers(1, seed=73),
    }
    if kind == "gated":
        tensors |= {
            "markov_head.gate_proj.weight": numbers(rank, HIDDEN + rank, seed=74),
            "markov_head.gate_proj.bias": numbers(rank, seed=75),
        }
    if kind == "rnn":
        tensors |= {
            "markov_head.joint_proj.weight": numbers(3 * rank, 2 * rank + HIDDEN, seed=76),
            "markov_head.joint_proj.bias": numbers(3 * rank, seed=77),
        }
    return tensors


def copies_of_the_targets() -> Tensors:
    target = target_tensors()
    return {"embed_tokens.weight": target["model.embed_tokens.weight"], "lm_head.weight": target["lm_head.weight"]}


def qwen3_config(**changes: Any) -> dict[str, Any]:
    return llama_config(model_type="qwen3", num_hidden_layers=1) | changes


def zlab_config(nested: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    block = {"mask_token_id": MASK_TOKEN, "target_layer_ids": [0, 2, 4]} | (nested or {})
    settings = {"architectures": ["DFlashDraftModel"], "block_size": BLOCK_SIZE, "num_target_layers": NUM_TARGET_LAYERS}
    return qwen3_config(**settings, dflash_config=block) | changes


def deepspec_config(**changes: Any) -> dict[str, Any]:
    settings = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": BLOCK_SIZE,
        "mask_token_id": MASK_TOKEN,
        "target_layer_ids": [-1, 2, 4],
        "num_target_layers": NUM_TARGET_LAYERS,
        "markov_rank": MARKOV_RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return qwen3_config(**settings) | changes


def block_speculators_config(kind: str, **changes: Any) -> dict[str, Any]:
    num_tokens = BLOCK_SIZE if kind == "dspark" else BLOCK_SIZE - 1
    return {
        "architectures": ["DFlashSpeculator" if kind == "dflash" else "DSparkSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": qwen3_config(),
        "block_size": BLOCK_SIZE,
        "aux_hidden_state_layer_ids": [1, 3, 5],
        "mask_token_id": MASK_TOKEN,
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": HIDDEN,
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}]},
    } | changes


def reduced_tensors() -> Tensors:
    """What speculators' format has besides: frozen copies, and the maps of a reduced vocabulary."""
    lm_head = {"lm_head.weight": numbers(DRAFT_VOCAB, HIDDEN, seed=80)}
    return {"embed_tokens.weight": target_tensors()["model.embed_tokens.weight"]} | lm_head | vocabulary_maps()
