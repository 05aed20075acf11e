"""What llama.cpp's converter changed in single tensors, undone when they are read.

Llama's query and key rows are in another order, Gemma's and Qwen3-Next's norms have 1 added, a decay is stored as
-exp(A_log), vectors and kernels of convolutions have other shapes, Qwen3.5's value heads are in another order. Not
here: parameters that are several tensors (joined).
"""

from __future__ import annotations

import torch

from outrider.engine.model.gguf.file import GgufFile

# Architectures whose queries and keys have reordered rows.
_REORDERED = {"llama", "granite", "granitemoe", "granitehybrid", "smollm3", "arcee"}
# Architectures whose norms have 1 added, but for those of recurrent layers (ssm_norm).
_NORMS_PLUS_ONE = {"gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe"}
# Architectures whose value heads of recurrent layers are in turns of the key heads: the first of each, the second, ...
_VALUE_HEADS_IN_TURN = {"qwen35", "qwen35moe"}
# Matrices of one row, which older converters made vectors.
_ROWS = {"ffn_gate_inp_shexp"}
# Vectors that are stored as matrices.
_VECTORS = {"ssm_a", "ssm_d", "ssm_norm"}
# Kernels [C, W] of convolutions, in the model [C, 1, W].
_KERNELS = {"ssm_conv1d", "shortconv.conv"}
_DECAY = "ssm_a"
# By architecture: tensors with an axis more in the model.
_ONE_ROW = {"ernie4_5-moe": {"exp_probs_b"}}


def shape_of(file: GgufFile, part: str, stored: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """The parameter's, of a tensor as torch has it. part: of its name; kind: "weight", "bias" or nothing."""
    if (part in _ROWS or part in _ONE_ROW.get(file.architecture, ())) and len(stored) == 1:
        return 1, *stored
    if part in _VECTORS:
        return (stored[0] * stored[1],) if len(stored) == 2 else stored
    if part in _KERNELS and kind == "weight":
        return stored[0], 1, stored[1]
    return stored


def values_of(file: GgufFile, part: str, kind: str, values: torch.Tensor) -> torch.Tensor:
    """The parameter's, of a tensor's rows and columns in the parameter's order."""
    if file.architecture in _NORMS_PLUS_ONE and part.endswith("norm") and part not in _VECTORS:
        values = values - 1
    if part == _DECAY:
        values = (-values).log()
    return values.reshape(shape_of(file, part, tuple(values.shape), kind))


def row_order(file: GgufFile, part: str, num_rows: int) -> torch.Tensor | None:
    """Where the parameter's rows are in the file, int64 [num_rows]; None: as they are."""
    if file.architecture in _REORDERED and part in ("attn_q", "attn_k"):
        return _rotated_pairs(file, part, num_rows)
    if file.architecture in _VALUE_HEADS_IN_TURN:
        return _value_rows(file, part, num_rows)
    return None


def column_order(file: GgufFile, part: str) -> torch.Tensor | None:
    """Where the parameter's columns are in the file, int64 [K]; None: as they are."""
    if file.architecture in _VALUE_HEADS_IN_TURN and part == "ssm_out":
        return _value_heads(file, file.own("ssm.inner_size"))
    return None


def _rotated_pairs(file: GgufFile, part: str, num_rows: int) -> torch.Tensor:
    """A head's rows are [d/2, 2] in the file (pairs that are rotated together), in transformers [2, d/2]."""
    num_heads = file.uniform("attention.head_count")
    if part == "attn_k":
        num_heads = file.uniform("attention.head_count_kv", num_heads)
    return torch.arange(num_rows).reshape(num_heads, -1, 2).transpose(1, 2).flatten()


def _value_heads(file: GgufFile, num_rows: int) -> torch.Tensor:
    """A value head's rows are at [its turn, its key head] in the file, in transformers at [key head, turn]."""
    num_values, num_keys = file.own("ssm.time_step_rank"), file.own("ssm.group_count")
    heads = torch.arange(num_rows).reshape(num_values // num_keys, num_keys, num_rows // num_values)
    return heads.transpose(0, 1).flatten()


def _value_rows(file: GgufFile, part: str, num_rows: int) -> torch.Tensor | None:
    if part in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        return _value_heads(file, num_rows)
    if part in ("ssm_conv1d", "attn_qkv"):
        keys = num_rows - file.own("ssm.inner_size")  # queries and keys, which come first
        return torch.cat((torch.arange(keys), keys + _value_heads(file, num_rows - keys)))
    return None
