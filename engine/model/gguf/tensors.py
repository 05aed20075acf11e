"""A GGUF file's tensors as the parameters of transformers' model: dequantised when they are read, or as codes.

What llama.cpp's converter changed is undone: Llama's query and key rows are in another order, Gemma's norms have 1
added, all experts of a layer are one tensor. Not here: the config (config).
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
_IN_LAYER_OF: dict[str, dict[str, str]] = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "llama": {  # Mixtral
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
        "ffn_up_exps": "block_sparse_moe.experts.*.w3",
        "ffn_down_exps": "block_sparse_moe.experts.*.w2",
    },
    "qwen3moe": {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.*.gate_proj",
        "ffn_up_exps": "mlp.experts.*.up_proj",
        "ffn_down_exps": "mlp.experts.*.down_proj",
    },
}
# Not a parameter: its content is in the config.
_IN_CONFIG = {"rope_freqs.weight"}


def gguf_readers(file: GgufFile) -> dict[str, WeightReader]:
    """Parameter's name -> how it is read, in float32. Raises ModelRefused for a tensor that is no parameter."""
    return {parameter: _reader(file, name, data) for parameter, name, data in _parameters(file)}


def gguf_tensors(file: GgufFile) -> dict[str, StoredTensor]:
    """By the parameter's name, each read in float32. Raises ModelRefused for a tensor that is no parameter."""
    found = {}
    for parameter, name, data in _parameters(file):
        shape = tuple(int(size) for size in reversed(file.tensors[name].shape))[-data.ndim :]
        found[parameter] = StoredTensor(Path(file.path), parameter, shape, "F32", _reader(file, name, data))
    return found


def _parameters(file: GgufFile) -> Iterator[tuple[str, str, NDArray[Any]]]:
    """(parameter's name, tensor's name, its data there)"""
    for name, tensor in file.tensors.items():
        if name in _IN_CONFIG:
            continue
        parameter = _parameter(file, name)
        if "*" in parameter:
            for expert, data in enumerate(tensor.data):
                yield parameter.replace("*", str(expert)), name, data
        else:
            yield parameter, name, tensor.data


def _parameter(file: GgufFile, name: str) -> str:
    match = _LAYER.fullmatch(name)
    if match is not None:
        layer, part, kind = match.groups()
        own = _IN_LAYER_OF.get(file.architecture, {})
        names = _IN_LAYER | own
        if part in names and not (kind == "bias" and part in own):
            return f"model.layers.{layer}.{names[part]}.{kind}"
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
        if file.architecture == "gemma3" and name.endswith("norm.weight"):
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
    """Where transformers' rows are in the file. Llama's queries and keys have a head's rows as [d/2, 2] in the file
    (pairs that are rotated together), as [2, d/2] in transformers."""
    if file.architecture != "llama" or not (".attn_q." in name or ".attn_k." in name):
        return slice(None)
    num_heads = file.own("attention.head_count")
    if ".attn_k." in name:
        num_heads = file.own("attention.head_count_kv", num_heads)
    return torch.arange(num_rows).reshape(num_heads, -1, 2).transpose(1, 2).flatten()
