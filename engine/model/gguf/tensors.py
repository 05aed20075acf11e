"""A GGUF file's tensors as the parameters of transformers' model: dequantised when they are read, or as codes.

What llama.cpp's converter changed is undone: Llama's query and key rows are in another order, Gemma's norms have 1
added, all experts of a layer are one tensor. Not here: the config (config), parameters of several tensors (joined).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.errors import ModelRefused
from outrider.engine.model.gguf.codes import codes_of, has_codes
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.joined import JOINED, Joined, Part
from outrider.engine.model.gguf.rope import LONGROPE_FACTORS
from outrider.engine.model.weight_files import StoredTensor
from outrider.engine.model.weight_reader import WeightReader
from outrider.kernels.linear.codes import Codes

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
# By architecture, what is called otherwise there, or only there; *: each expert's number.
_QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_IN_LAYER_OF: dict[str, dict[str, str]] = {
    "deepseek2": {
        **_QWEN_EXPERTS,
        "exp_probs_b": "mlp.gate.e_score_correction",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
    },
    "gemma2": _GEMMA_NORMS,
    "gemma3": _GEMMA_NORMS,
    "llama": {  # Mixtral
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
        "ffn_up_exps": "block_sparse_moe.experts.*.w3",
        "ffn_down_exps": "block_sparse_moe.experts.*.w2",
    },
    "gpt-oss": {
        "attn_sinks": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    "olmo2": {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "qwen2moe": {
        **_QWEN_EXPERTS,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    "qwen3moe": _QWEN_EXPERTS,
}
# Names that are more than a module's and weight or bias.
_RENAMED = {
    "mlp.gate.e_score_correction.bias": "mlp.gate.e_score_correction_bias",
    "self_attn.sinks.weight": "self_attn.sinks",
}
# Queries and keys whose rows the converter has reordered.
_REORDERED = {"llama", "granite"}
# Parts of _IN_LAYER_OF that may have a bias.
_BIASED = {"deepseek2": {"exp_probs_b"}, "gpt-oss": {"ffn_gate_inp"}}
# A matrix of one row, which older converters made a vector.
_IS_ROW = ".ffn_gate_inp_shexp.weight"
# Architectures whose converter adds 1 to the norms.
_NORMS_PLUS_ONE = {"gemma2", "gemma3"}
# Not a parameter: its content is in the config.
_IN_CONFIG = {"rope_freqs.weight"}
_IN_CONFIG_OF = {"phi3": LONGROPE_FACTORS}


def gguf_readers(file: GgufFile) -> dict[str, WeightReader]:
    """Parameter's name -> how it is read, in float32. Raises ModelRefused for a tensor that is no parameter."""
    return {parameter: reader for parameter, _, reader in _parameters(file)}


def gguf_tensors(file: GgufFile) -> dict[str, StoredTensor]:
    """By the parameter's name, each read in float32. Raises ModelRefused for a tensor that is no parameter."""
    return {
        parameter: StoredTensor(Path(file.path), parameter, shape, "F32", reader)
        for parameter, shape, reader in _parameters(file)
    }


def _parameters(file: GgufFile) -> Iterator[tuple[str, tuple[int, ...], WeightReader]]:
    """(parameter's name, its shape, how it is read)"""
    used = _IN_CONFIG | _IN_CONFIG_OF.get(file.architecture, frozenset())
    for layer, part, joined in _joined(file):
        names = [f"blk.{layer}.{tensor}" for tensor in joined.tensors]
        used.update(names)
        yield f"model.layers.{layer}.{part}", *joined.join([_part(file, name) for name in names])
    for name, tensor in file.tensors.items():
        if name in used:
            continue
        parameter, shape = _parameter(file, name), _shape(file, name)
        if "*" in parameter:
            for expert, data in enumerate(tensor.data):
                yield parameter.replace("*", str(expert)), shape[1:], _reader(file, name, data)
        else:
            yield parameter, shape, _reader(file, name, tensor.data)


def _joined(file: GgufFile) -> Iterator[tuple[int, str, Joined]]:
    """(layer, parameter's name in it, what makes it up), of layers that have such tensors. Raises ModelRefused: not
    all of them."""
    for part, joined in JOINED.get(file.architecture, {}).items():
        for layer in range(file.own("block_count")):
            missing = [name for tensor in joined.tensors if (name := f"blk.{layer}.{tensor}") not in file.tensors]
            if len(missing) == len(joined.tensors):
                continue  # the model's own check says what it lacks
            if missing:
                raise ModelRefused(file.path, f"it has no tensor {missing[0]}", "download it again")
            yield layer, part, joined


def _part(file: GgufFile, name: str) -> Part:
    tensor = file.tensors[name]

    def expert_codes(expert: int) -> Codes:
        codes = _reader(file, name, tensor.data[expert]).codes
        if codes is None:
            raise ModelRefused(file.path, f"its tensor {name} has no codes")
        return codes()

    kind = tensor.tensor_type.name
    shape, read = _shape(file, name), _reader(file, name, tensor.data)
    return Part(shape, kind, read, expert_codes if has_codes(kind) else None)


def _shape(file: GgufFile, name: str) -> tuple[int, ...]:
    """As torch has it."""
    shape = tuple(int(size) for size in reversed(file.tensors[name].shape))
    return (1, *shape) if len(shape) == 1 and _IS_ROW in name else shape


def _parameter(file: GgufFile, name: str) -> str:
    match = _LAYER.fullmatch(name)
    if match is not None:
        layer, part, kind = match.groups()
        own = _IN_LAYER_OF.get(file.architecture, {})
        names = _IN_LAYER | own
        may_have = kind == "weight" or part not in own or part in _BIASED.get(file.architecture, ())
        if part in names and may_have:
            parameter = f"{names[part]}.{kind}"
            return f"model.layers.{layer}.{_RENAMED.get(parameter, parameter)}"
    elif name in _WHOLE:
        return _WHOLE[name]
    raise ModelRefused(file.path, f"its tensor {name} is not read")


def _reader(file: GgufFile, name: str, data: NDArray[Any]) -> WeightReader:
    """data: the tensor's, or one expert's of it."""
    kind = file.tensors[name].tensor_type

    def require_finite(*parts: torch.Tensor | None) -> None:
        if not all(bool(torch.isfinite(part).all()) for part in parts if part is not None):
            raise ModelRefused(file.path, f"its tensor {name} has values that are not finite")

    def read() -> torch.Tensor:
        values = dequantised(data, kind)
        values = values[_row_order(file, name, len(values))]
        if _IS_ROW in name:
            values = values.reshape(1, -1)
        if file.architecture in _NORMS_PLUS_ONE and name.endswith("norm.weight"):
            values = values - 1
        require_finite(values)
        return values

    def codes() -> Codes:
        from gguf import GGML_QUANT_SIZES

        block_bytes = GGML_QUANT_SIZES[kind][1]
        found = codes_of(torch.from_numpy(np.array(data)), kind.name, block_bytes)
        require_finite(found.scales, found.minimums)
        order = _row_order(file, name, found.shape[0])
        return found if isinstance(order, slice) else found.rows(order)

    return WeightReader(read, codes if has_codes(kind.name) else None)


def dequantised(data: NDArray[Any], kind: Any) -> torch.Tensor:
    """kind: of gguf.GGMLQuantizationType."""
    from gguf.quants import dequantize

    return torch.from_numpy(np.array(dequantize(data, kind), np.float32))


def _row_order(file: GgufFile, name: str, num_rows: int) -> torch.Tensor | slice:
    """Where transformers' rows are in the file. Llama's and Granite's queries and keys have a head's rows there as
    [d/2, 2] (pairs that are rotated together), in transformers as [2, d/2]."""
    if file.architecture not in _REORDERED or not (".attn_q." in name or ".attn_k." in name):
        return slice(None)
    num_heads = file.own("attention.head_count")
    if ".attn_k." in name:
        num_heads = file.own("attention.head_count_kv", num_heads)
    return torch.arange(num_rows).reshape(num_heads, -1, 2).transpose(1, 2).flatten()
