"""Parameters of transformers' models that a GGUF file has in several tensors, or transposed.

gpt-oss: an expert's gate and up rows are interleaved in one parameter, and experts are [E, K, N] in the model, [E, N,
K] in the file. Granite: gate and up are concatenated. Latent attention: kv_b_proj is k_b, whose heads are transposed,
and v_b. Qwen3-Next: a key head's rows of queries, keys, values and gates lie together. Not here: which architectures
have them (their records), tensors that are one parameter each (tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.weight_files import WeightReader
from outrider.kernels.linear.codes import Codes, stacked

# Reads expert e's matrix of a tensor [E, N, K], as codes.
ExpertCodes = Callable[[int], Codes]


@dataclass(frozen=True)
class Part:
    """A tensor of the file.

    shape: as torch has it; kind: the name of its type; codes: None if the type has none; expert_codes: those of one
    expert, where the tensor holds all experts of a layer.
    """

    shape: tuple[int, ...]
    kind: str
    read: Callable[[], torch.Tensor]
    codes: Callable[[], Codes] | None
    expert_codes: ExpertCodes | None


# Returns the parameter's (shape, reader), made from its tensors.
Join = Callable[[GgufFile, Sequence[Part]], tuple[tuple[int, ...], WeightReader]]


@dataclass(frozen=True)
class Joined:
    """A parameter made of several tensors. parameter: its name in the layer; tensors: their names in the file."""

    parameter: str
    tensors: tuple[str, ...]
    join: Join


def _in_turn(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Interleaves rows: the first of each part, then the second of each. P times [E, n, ...] -> [E, P * n, ...]"""
    return torch.stack(tuple(parts), 2).flatten(1, 2)


def experts_in_turn(file: GgufFile, parts: Sequence[Part]) -> tuple[tuple[int, ...], WeightReader]:
    """Interleaves the parts' rows and transposes: P times [E, N, K] -> [E, K, P * N]."""
    num_experts, outputs, inputs = parts[0].shape

    def read() -> torch.Tensor:
        return _in_turn([part.read() for part in parts]).transpose(1, 2).contiguous()

    def expert_codes(expert: int) -> Codes:
        return _rows_in_turn([part.expert_codes(expert) for part in parts if part.expert_codes is not None])

    packs = len({part.kind for part in parts}) == 1 and parts[0].expert_codes is not None
    shape = (num_experts, inputs, len(parts) * outputs)
    return shape, WeightReader(read, expert_codes=expert_codes if packs else None)


def _rows_in_turn(codes: Sequence[Codes]) -> Codes:
    """Interleaves the rows of weights of the same type and shape, and so of the same groups."""
    num_outputs = codes[0].shape[0]
    return stacked(codes).rows(torch.arange(len(codes) * num_outputs).reshape(len(codes), num_outputs).T.flatten())


def biases_in_turn(file: GgufFile, parts: Sequence[Part]) -> tuple[tuple[int, ...], WeightReader]:
    """Interleaves the parts' biases: P times [E, n] -> [E, P * n]."""
    shape = (parts[0].shape[0], len(parts) * parts[0].shape[1])
    return shape, WeightReader(lambda: _in_turn([part.read() for part in parts]))


def keys_and_values(file: GgufFile, parts: Sequence[Part]) -> tuple[tuple[int, ...], WeightReader]:
    """Joins k_b [H, latent, n] and v_b [H, v, latent] into kv_b_proj [H * (n + v), latent]."""
    keys, values = parts
    num_heads, latent, width = keys.shape
    shape = (num_heads * (width + values.shape[1]), latent)
    return shape, WeightReader(lambda: torch.cat((keys.read().transpose(1, 2), values.read()), 1).flatten(0, 1))


def one_after_another(file: GgufFile, parts: Sequence[Part]) -> tuple[tuple[int, ...], WeightReader]:
    """Concatenates the parts' outputs: P times [N, K] -> [P * N, K], or [E, N, K] of every expert -> [E, P * N, K]."""
    *_, outputs, inputs = parts[0].shape
    shape = (*parts[0].shape[:-2], len(parts) * outputs, inputs)
    packs = len({part.kind for part in parts}) == 1

    def codes() -> Codes:
        return stacked([part.codes() for part in parts if part.codes is not None])

    def expert_codes(expert: int) -> Codes:
        return stacked([part.expert_codes(expert) for part in parts if part.expert_codes is not None])

    return shape, WeightReader(
        lambda: torch.cat([part.read() for part in parts], -2),
        codes if packs and parts[0].codes is not None else None,
        expert_codes if packs and parts[0].expert_codes is not None else None,
    )


def by_key_head(file: GgufFile, parts: Sequence[Part]) -> tuple[tuple[int, ...], WeightReader]:
    """Groups rows by key head: queries, keys and values [2Q + V, K], and gates [V, K] -> [2Q + 2V, K]."""
    num_heads, inner = file.own("ssm.group_count"), file.own("ssm.inner_size")
    qkv, gates = parts
    keys = (qkv.shape[0] - inner) // 2

    def read() -> torch.Tensor:
        pieces = (*torch.split(qkv.read(), [keys, keys, inner]), gates.read())
        return torch.cat([piece.reshape(num_heads, -1, qkv.shape[1]) for piece in pieces], 1).flatten(0, 1)

    return (qkv.shape[0] + inner, qkv.shape[1]), WeightReader(read)


def input_and_output(module: str, suffix: str) -> tuple[Joined, Joined]:
    """Returns Granite's pair of linears: gate and up are one linear. suffix: that of the tensors' names."""
    gate_and_up = f"ffn_gate{suffix}.weight", f"ffn_up{suffix}.weight"
    return (
        Joined(f"{module}.input_linear.weight", gate_and_up, one_after_another),
        Joined(f"{module}.output_linear.weight", (f"ffn_down{suffix}.weight",), one_after_another),
    )
