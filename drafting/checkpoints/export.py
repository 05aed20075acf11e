"""Writes heads in the layouts of other servers; reloading gives the same head, bit for bit.

Medusa and MLP speculator: vLLM's; EAGLE-1: SafeAILab's; EAGLE-3, DSpark and DFlash: the speculators format, which vLLM
detects.
Not here: training them, and whole models (training.export).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.drafting.checkpoints.mlp_speculator import PREFIX
from outrider.drafting.heads.block import BlockHead
from outrider.drafting.heads.decoder import DecoderConfig
from outrider.drafting.heads.eagle import EagleHead
from outrider.drafting.heads.eagle3 import Eagle3Head
from outrider.drafting.heads.errors import HeadConfigError
from outrider.drafting.heads.medusa import MedusaHeads
from outrider.drafting.heads.mlp_speculator import MlpSpeculator
from outrider.engine.model.row_invariant_modules import RowInvariantLinear

SPECULATORS_VERSION = "0.9.0"


def export_medusa(heads: MedusaHeads, directory: Path, *, target: str, dtype: torch.dtype | None = None) -> None:
    """Writes vLLM's Medusa layout.

    A shared output head is written as lm_head.weight too: vLLM does not use the target's. target: name or path of the
    heads' target. dtype: of the written floats; None: unchanged.
    """
    config = heads.config
    tensors = dict(heads.state_dict())
    if heads.lm_head is not None:
        tensors["lm_head.weight"] = heads.lm_head.weight
    content = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": target,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "max_paths": 64,
        "topk": 10,
        "truncated_vocab_size": config.head_vocab_size,
        "original_lm_head": config.shares_lm_head,
        "medusa_fc_bias": config.has_bias,
    }
    _write(heads, directory, content, tensors, dtype)


def export_mlp_speculator(head: MlpSpeculator, directory: Path, *, dtype: torch.dtype | None = None) -> None:
    """Writes IBM's layout of an MLP speculator."""
    config = head.config
    content = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": config.vocab_size,
        "emb_dim": config.emb_dim,
        "inner_dim": config.inner_dim,
        "n_predict": config.n_predict,
        "n_candidates": config.n_candidates,
        "top_k_tokens_per_head": list(config.top_k_tokens_per_head),
        "tie_weights": config.tie_weights,
        "scale_input": config.scale_input,
    }
    _write(head, directory, content, {PREFIX + name: found for name, found in head.state_dict().items()}, dtype)


def export_eagle(
    head: EagleHead, directory: Path, *, with_embedding: bool = True, dtype: torch.dtype | None = None
) -> None:
    """Writes SafeAILab's EAGLE-1 layout. with_embedding=False omits an embedding that is the target's own.

    SafeAILab's code takes config.json's `bias` as that of `fc`, and as true where it is absent; vLLM takes it as that
    of the attention, and as false. So it is only written where both are right.
    """
    tensors = dict(head.state_dict())
    if with_embedding:
        tensors["embed_tokens.weight"] = head.embed_tokens.weight
    decoder = head.config.decoder
    architecture = "Qwen3ForCausalLM" if decoder.model_type == "qwen3" else "LlamaForCausalLM"
    content = _decoder_content(decoder) | {"architectures": [architecture]}
    if not head.config.fc_bias:
        content["bias"] = False
    _write(head, directory, content, tensors, dtype)


def export_eagle3(
    head: Eagle3Head,
    directory: Path,
    *,
    target: str,
    target_architecture: str,
    num_speculative_tokens: int = 3,
    with_embedding: bool = True,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes the speculators format of EAGLE-3.

    target: name or path of the model; target_architecture: e.g. "LlamaForCausalLM". with_embedding=False omits an
    embedding that is the target's own.
    """
    config, decoder = head.config, head.config.decoder
    tensors = dict(head.state_dict()) | {"lm_head.weight": head.lm_head.weight}
    if with_embedding:
        tensors["embed_tokens.weight"] = head.embed_tokens.weight
    tensors |= _known_tokens(head.target_ids, decoder.vocab_size)
    content = _speculators_content("eagle3", target, target_architecture, num_speculative_tokens) | {
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": _decoder_content(decoder),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers) if config.has_fc else None,
        "eagle_config": {"use_aux_hidden_state": config.has_fc},
    }
    _write(head, directory, content, tensors, dtype)


def export_block(
    head: BlockHead,
    directory: Path,
    *,
    target: str,
    target_architecture: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes the speculators format of DSpark, or of DFlash for a head that does not predict from its anchor.

    `is_causal` is not of that format: it says, as DFlash's own configs do, that a block's rows see only earlier ones.
    target: name or path of the model; target_architecture: e.g. "LlamaForCausalLM".
    """
    config, decoder = head.config, head.config.decoder
    kind = "dspark" if config.predicts_from_anchor else "dflash"
    if any(config.sliding) or len(set(config.causal)) > 1:
        raise HeadConfigError("only block heads whose layers all see the same can be written")
    content = _speculators_content(kind, target, target_architecture, config.max_num_draft_tokens) | {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "transformer_layer_config": _decoder_content(decoder),
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.feature_layers),
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "sample_from_anchor": config.predicts_from_anchor,
        "is_causal": config.causal[0],
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": False,
    }
    tensors = dict(head.state_dict()) | _known_tokens(head.target_ids, decoder.vocab_size)
    _write(head, directory, content, tensors, dtype)


def _speculators_content(
    algorithm: str, target: str, target_architecture: str, num_speculative_tokens: int
) -> dict[str, Any]:
    """Returns what the speculators format says of every algorithm."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": [target_architecture]},
        },
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }


def _known_tokens(target_ids: torch.Tensor | None, vocab_size: int) -> dict[str, torch.Tensor]:
    """Returns `t2d`, which of the target's tokens a reduced draft vocabulary has."""
    if target_ids is None:
        return {}
    knows = torch.zeros(vocab_size, dtype=torch.bool)
    knows[target_ids.cpu()] = True
    return {"t2d": knows}


def _decoder_content(decoder: DecoderConfig) -> dict[str, Any]:
    """Returns the decoder's config, with RoPE in both styles.

    transformers 5 reads rope_parameters, older readers the other two keys.
    """
    rope = dict(decoder.rope_parameters)
    scaling = {key: found for key, found in rope.items() if key != "rope_theta"}
    return {
        "model_type": decoder.model_type,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_attention_heads": decoder.num_attention_heads,
        "num_key_value_heads": decoder.num_key_value_heads,
        "head_dim": decoder.head_dim,
        "num_hidden_layers": decoder.num_hidden_layers,
        "vocab_size": decoder.vocab_size,
        "hidden_act": decoder.hidden_act,
        "rms_norm_eps": decoder.rms_norm_eps,
        "max_position_embeddings": decoder.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "attention_bias": decoder.qkv_bias,
        "mlp_bias": decoder.mlp_bias,
        "tie_word_embeddings": False,
    }


def _write(
    head: torch.nn.Module,
    directory: Path,
    content: dict[str, Any],
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
) -> None:
    """Writes model.safetensors, then config.json, each renamed into place once complete. Raises HeadConfigError."""
    if any(isinstance(module, RowInvariantLinear) for module in head.modules()):
        raise HeadConfigError("a head whose linears were made row-invariant has no plain weights to write")
    directory.mkdir(parents=True, exist_ok=True)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        is_float = tensor.is_floating_point()
        plain = tensor.detach().cpu().to(dtype if is_float and dtype is not None else tensor.dtype)
        stored[name] = plain.contiguous().clone()  # safetensors refuses tensors that share memory
    partial = directory / "model.safetensors.partial"
    save_file(stored, str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)  # save_file makes it private to this user, but containers run as another
    partial.rename(directory / "model.safetensors")
    content["dtype"] = str(next(found.dtype for found in stored.values() if found.is_floating_point()))[6:]
    partial = directory / "config.json.partial"
    partial.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    partial.rename(directory / "config.json")
