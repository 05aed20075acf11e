"""Parameters of transformers' models that a GGUF file has in several tensors, or turned round.

gpt-oss: an expert's gate and up rows lie in turn in one parameter, and experts are [E, K, N] in the model, [E, N, K] in
the file. Latent attention: kv_b_proj is k_b, whose heads are turned round, and v_b. Not here: tensors that are one
parameter each (tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from outrider.engine.model.weight_reader import WeightReader
from outrider.kernels.linear.codes import Codes

# Reads expert e's matrix of a tensor [E, N, K], as codes.
ExpertCodes = Callable[[int], Codes]


@dataclass(frozen=True)
class Part:
    """A tensor of the file. shape: as torch has it; kind: the name of its type; expert_codes: None: it has no codes."""

    shape: tuple[int, ...]
    kind: str
    read: Callable[[], torch.Tensor]
    expert_codes: ExpertCodes | None


@dataclass(frozen=True)
class Joined:
    """tensors: what a layer's are called in the file; join: makes the parameter's (shape, reader) of them."""

    tensors: tuple[str, ...]
    join: Callable[[Sequence[Part]], tuple[tuple[int, ...], WeightReader]]


def _in_turn(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first row of each part, the second of each, and so on. P times [E, n, ...] -> [E, P * n, ...]"""
    return torch.stack(tuple(parts), 2).flatten(1, 2)


def _experts(parts: Sequence[Part]) -> tuple[tuple[int, ...], WeightReader]:
    """[E, K, P * N]"""
    num_experts, outputs, inputs = parts[0].shape

    def read() -> torch.Tensor:
        return _in_turn([part.read() for part in parts]).transpose(1, 2).contiguous()

    def expert_codes(expert: int) -> Codes:
        return _rows_in_turn([part.expert_codes(expert) for part in parts if part.expert_codes is not None])

    packs = len({part.kind for part in parts}) == 1 and parts[0].expert_codes is not None
    shape = (num_experts, inputs, len(parts) * outputs)
    return shape, WeightReader(read, expert_codes=expert_codes if packs else None)


def _rows_in_turn(codes: Sequence[Codes]) -> Codes:
    """Of weights of the same type and inputs, so of the same groups."""
    if len(codes) == 1:
        return codes[0]

    def rows(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(parts, 1).flatten(0, 1)

    minimums = [each.minimums for each in codes if each.minimums is not None]
    return replace(
        codes[0],
        numbers=rows([each.numbers for each in codes]),
        scales=rows([each.scales for each in codes]),
        minimums=rows(minimums) if minimums else None,
    )


def _biases(parts: Sequence[Part]) -> tuple[tuple[int, ...], WeightReader]:
    """[E, P * n]"""
    shape = (parts[0].shape[0], len(parts) * parts[0].shape[1])
    return shape, WeightReader(lambda: _in_turn([part.read() for part in parts]))


def _latent_heads(parts: Sequence[Part]) -> tuple[tuple[int, ...], WeightReader]:
    """k_b [H, latent, n] and v_b [H, v, latent] -> [H * (n + v), latent]"""
    keys, values = parts
    num_heads, latent, width = keys.shape
    shape = (num_heads * (width + values.shape[1]), latent)
    return shape, WeightReader(lambda: torch.cat((keys.read().transpose(1, 2), values.read()), 1).flatten(0, 1))


# By architecture: the parameter's name in its layer -> what makes it up.
JOINED: Mapping[str, Mapping[str, Joined]] = {
    "gpt-oss": {
        "mlp.experts.gate_up_proj": Joined(("ffn_gate_exps.weight", "ffn_up_exps.weight"), _experts),
        "mlp.experts.down_proj": Joined(("ffn_down_exps.weight",), _experts),
        "mlp.experts.gate_up_proj_bias": Joined(("ffn_gate_exps.bias", "ffn_up_exps.bias"), _biases),
        "mlp.experts.down_proj_bias": Joined(("ffn_down_exps.bias",), _biases),
    },
    "deepseek2": {
        "self_attn.kv_b_proj.weight": Joined(("attn_k_b.weight", "attn_v_b.weight"), _latent_heads),
    },
}
