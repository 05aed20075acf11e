"""Undoes, when a tensor is read, what llama.cpp's converter changed in it.

Llama's query and key rows are in another order, Gemma's and Qwen3-Next's norms have 1 added, a decay is stored as
-exp(A_log), vectors and kernels of convolutions have other shapes, Qwen3.5's value heads are in another order. Not
here: which architectures are changed in which way (their records), parameters that are several tensors (joined).
"""

from __future__ import annotations

import torch

from outrider.engine.model.gguf.architecture import Architecture
from outrider.engine.model.gguf.file import GgufFile

# Matrices of one row, which older converters stored as vectors.
_ROWS = {"ffn_gate_inp_shexp"}
# Vectors that are stored as matrices.
_VECTORS = {"ssm_a", "ssm_d", "ssm_norm"}
# Kernels of convolutions: [C, W] in the file, [C, 1, W] in the model.
_KERNELS = {"ssm_conv1d", "shortconv.conv"}
_DECAY = "ssm_a"


def shape_of(architecture: Architecture, part: str, stored: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """Returns the parameter's shape.

    part: of the tensor's name; stored: the tensor's shape, as torch has it; kind: "weight", "bias" or "".
    """
    if (part in _ROWS or part in architecture.one_row) and len(stored) == 1:
        return 1, *stored
    if part in _VECTORS:
        return (stored[0] * stored[1],) if len(stored) == 2 else stored
    if part in _KERNELS and kind == "weight":
        return stored[0], 1, stored[1]
    return stored


def values_of(architecture: Architecture, part: str, kind: str, values: torch.Tensor) -> torch.Tensor:
    """Returns the parameter's values, from a tensor's values in the parameter's order of rows and columns."""
    if architecture.norms_plus_one and part.endswith("norm") and part not in _VECTORS:
        values = values - 1
    if part == _DECAY:
        values = (-values).log()
    return values.reshape(shape_of(architecture, part, tuple(values.shape), kind))


def rotated_pairs(file: GgufFile, part: str, num_rows: int) -> torch.Tensor | None:
    """Returns the order of rows of queries and keys. A head's rows are [d/2, 2] in the file (pairs that are rotated
    together), [2, d/2] in transformers."""
    if part not in ("attn_q", "attn_k"):
        return None
    num_heads = file.uniform("attention.head_count")
    if part == "attn_k":
        num_heads = file.uniform("attention.head_count_kv", num_heads)
    return torch.arange(num_rows).reshape(num_heads, -1, 2).transpose(1, 2).flatten()


def _value_heads(file: GgufFile, num_rows: int) -> torch.Tensor:
    """Returns the order of value heads' rows: [turn, key head] in the file, [key head, turn] in transformers."""
    num_values, num_keys = file.own("ssm.time_step_rank"), file.own("ssm.group_count")
    heads = torch.arange(num_rows).reshape(num_values // num_keys, num_keys, num_rows // num_values)
    return heads.transpose(0, 1).flatten()


def value_head_rows(file: GgufFile, part: str, num_rows: int) -> torch.Tensor | None:
    """Returns the order of rows of recurrent layers' value heads: the file has the first value head of each key head,
    then the second of each, and so on."""
    if part in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        return _value_heads(file, num_rows)
    if part in ("ssm_conv1d", "attn_qkv"):
        keys = num_rows - file.own("ssm.inner_size")  # queries and keys, which come first
        return torch.cat((torch.arange(keys), keys + _value_heads(file, num_rows - keys)))
    return None


def value_head_columns(file: GgufFile, part: str, num_columns: int) -> torch.Tensor | None:
    """Returns the order of columns of the linear that reads the value heads of `value_head_rows`."""
    return _value_heads(file, num_columns) if part == "ssm_out" else None
