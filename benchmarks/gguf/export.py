"""Writes a Llama checkpoint as a GGUF file of the same weights, for llama.cpp as a peer.

Matrices keep their bf16 bits; norms become f32, as llama.cpp requires, with equal values. The rows of q_proj and k_proj
are reordered: transformers rotates row i of a head with row i + head_dim / 2, llama.cpp row 2i with row 2i + 1.

llama.cpp has no pre-tokenizer that splits as the demo family's does: output text is right, but prompts must be token
ids. Not here: other architectures, quantization. Run: `python -m benchmarks.gguf.export models/demo-draft draft.gguf`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import gguf
import torch
import typer
from safetensors.torch import load_file
from transformers import LlamaConfig

from outrider.shared.errors import ConfigError


def export_gguf(model_dir: Path, out: Path) -> None:
    """Writes the Llama in `model_dir` (config.json, model.safetensors, tokenizer.json) to `out`.

    Raises ConfigError for unsupported models: biases, scaled rotary positions, dtypes other than bf16.
    """
    config = LlamaConfig.from_pretrained(model_dir)
    rotary_kind = config.rope_parameters["rope_type"]
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias or rotary_kind != "default":
        raise ConfigError(f"{model_dir}: only a Llama without biases and with rope_type default can be written as GGUF")
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    _add_shape(writer, config)
    _add_tokenizer(writer, json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8")), config)
    _add_tensors(writer, load_file(model_dir / "model.safetensors"), config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, config: LlamaConfig) -> None:
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: LlamaConfig) -> None:
    """The byte-level BPE of a tokenizer.json: tokens by id, merges, special ids."""
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    tokens = special | {token_id: token for token, token_id in tokenizer["model"]["vocab"].items()}
    kinds = [
        gguf.TokenType.CONTROL if token_id in special else gguf.TokenType.NORMAL for token_id in range(len(tokens))
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([tokens[token_id] for token_id in range(len(tokens))])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    stop_ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(stop_ids[0])
    writer.add_add_bos_token(False)


def _add_tensors(writer: gguf.GGUFWriter, tensors: dict[str, torch.Tensor], config: LlamaConfig) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in tensors.items():
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        if gguf_name is None or tensor.dtype != torch.bfloat16:
            raise ConfigError(f"{name}, {tensor.dtype}: only the bf16 weights of a plain Llama can be written as GGUF")
        if tensor.ndim == 1:
            writer.add_tensor(gguf_name, tensor.float().numpy())
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _rotary_pairs_side_by_side(tensor, config.head_dim)
        # numpy has no bf16, so the bits are written as bytes.
        writer.add_tensor(gguf_name, tensor.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)


def _rotary_pairs_side_by_side(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[heads * head_dim, hidden_size] with each head's rows i and i + head_dim / 2 as rows 2i and 2i + 1."""
    halves = weight.view(-1, 2, head_dim // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def main(
    model_dir: Annotated[Path, typer.Argument(help="HF folder of a Llama in bf16")],
    out: Annotated[Path, typer.Argument(help="the GGUF file to write")],
) -> None:
    """Example: python -m benchmarks.gguf.export models/demo-draft draft.gguf"""
    export_gguf(model_dir, out)


if __name__ == "__main__":
    typer.run(main)
