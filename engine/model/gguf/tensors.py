"""A GGUF file's tensors as the parameters of transformers' model: dequantised when they are read, or as codes.

What llama.cpp's converter changed is undone: Llama's query and key rows are in another order, Gemma's norms have 1
added. Not here: the config (config).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
_IN_GEMMA3_LAYER = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Not a parameter: its content is in the config.
_IN_CONFIG = {"rope_freqs.weight"}


def gguf_readers(file: GgufFile) -> dict[str, WeightReader]:
    """Parameter's name -> how it is read, in float32. Raises ModelRefused for a tensor that is no parameter."""
    return {_parameter(file, name): _reader(file, name) for name in file.tensors if name not in _IN_CONFIG}


def gguf_tensors(file: GgufFile) -> dict[str, StoredTensor]:
    """By the parameter's name, each read in float32. Raises ModelRefused for a tensor that is no parameter."""
    found = (_stored(file, name) for name in file.tensors if name not in _IN_CONFIG)
    return {tensor.name: tensor for tensor in found}


def _stored(file: GgufFile, name: str) -> StoredTensor:
    shape = tuple(int(size) for size in reversed(file.tensors[name].shape))
    return StoredTensor(Path(file.path), _parameter(file, name), shape, "F32", _reader(file, name))


def _parameter(file: GgufFile, name: str) -> str:
    match = _LAYER.fullmatch(name)
    if match is not None:
        layer, part, kind = match.groups()
        names = _IN_LAYER | _IN_GEMMA3_LAYER if file.architecture == "gemma3" else _IN_LAYER
        if part in names:
            return f"model.layers.{layer}.{names[part]}.{kind}"
    elif name in _WHOLE:
        return _WHOLE[name]
    raise ModelRefused(file.path, f"its tensor {name} is not read")


def _reader(file: GgufFile, name: str) -> WeightReader:
    tensor = file.tensors[name]

    def require_finite(*parts: torch.Tensor | None) -> None:
        if not all(bool(torch.isfinite(part).all()) for part in parts if part is not None):
            raise ModelRefused(file.path, f"its tensor {name} has values that are not finite")

    def read() -> torch.Tensor:
        values = dequantised(tensor)
        values = values[_row_order(file, name, len(values))]
        if file.architecture == "gemma3" and name.endswith("norm.weight"):
            values = values - 1
        require_finite(values)
        return values

    def codes() -> Codes:
        from gguf import GGML_QUANT_SIZES

        block_bytes = GGML_QUANT_SIZES[tensor.tensor_type][1]
        found = codes_of(torch.from_numpy(np.array(tensor.data)), tensor.tensor_type.name, block_bytes)
        require_finite(found.scales, found.minimums)
        order = _row_order(file, name, found.shape[0])
        return found if isinstance(order, slice) else found.rows(order)

    return WeightReader(read, codes if has_codes(tensor.tensor_type.name) else None)


def dequantised(tensor: Any) -> torch.Tensor:
    from gguf.quants import dequantize

    return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), np.float32))


def _row_order(file: GgufFile, name: str, num_rows: int) -> torch.Tensor | slice:
    """Where transformers' rows are in the file. Llama's queries and keys have a head's rows as [d/2, 2] in the file
    (pairs that are rotated together), as [2, d/2] in transformers."""
    if file.architecture != "llama" or not (".attn_q." in name or ".attn_k." in name):
        return slice(None)
    num_heads = file.own("attention.head_count")
    if ".attn_k." in name:
        num_heads = file.own("attention.head_count_kv", num_heads)
    return torch.arange(num_rows).reshape(num_heads, -1, 2).transpose(1, 2).flatten()
