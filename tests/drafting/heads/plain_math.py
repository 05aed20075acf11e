"""The published equations of the draft heads in plain float64 torch, on tensors under their public names.

Written from the papers and the checkpoint formats; shares no code with drafter_service.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """What the equations need besides the tensors."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float = 1e-5
    theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    num_layers: int = 1
    rotates_neighbours: bool = False
    has_norms: bool = False  # before the first layer and after the last one, in EAGLE-1
    key_dim: int = 0  # of latent attention: elements of a head's key that are not rotated; head_dim are
    value_dim: int = 0


def mean_square_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) * weight


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def linear(tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    y = x @ tensors[f"{name}.weight"].T
    return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y


def frequency(pair: int, shape: Shape) -> float:
    """Radians per position of one pair of a head's dimensions; the scalings as in their sources."""
    plain = shape.theta ** (-2 * pair / shape.head_dim)
    scaling = shape.rope_scaling
    if scaling is None:
        return plain
    if scaling["rope_type"] == "linear":
        return plain / scaling["factor"]
    wavelength = 2 * math.pi / plain
    original = scaling["original_max_position_embeddings"]
    if scaling["rope_type"] == "yarn":  # arXiv 2309.00071, with ramps between whole pairs

        def pair_of(rotations: float) -> float:
            return shape.head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(shape.theta))

        low, high = max(0, math.floor(pair_of(32))), min(shape.head_dim - 1, math.ceil(pair_of(1)))
        ramp = min(1, max(0, (pair - low) / max(high - low, 0.001)))
        return plain / scaling["factor"] * ramp + plain * (1 - ramp)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wavelength < original / high:
        return plain
    if wavelength > original / low:
        return plain / scaling["factor"]
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * plain / scaling["factor"] + smooth * plain


def rotate(x: torch.Tensor, positions: list[int], shape: Shape) -> torch.Tensor:
    """RoPE on x [T, heads, head_dim]: dimension i is paired with i + head_dim / 2, or 2 i with 2 i + 1."""
    rotated = torch.empty_like(x)
    half = shape.head_dim // 2
    for row, position in enumerate(positions):
        for pair in range(half):
            angle = position * frequency(pair, shape)
            first, second = (2 * pair, 2 * pair + 1) if shape.rotates_neighbours else (pair, pair + half)
            a, b = x[row, :, first], x[row, :, second]
            rotated[row, :, first] = a * math.cos(angle) - b * math.sin(angle)
            rotated[row, :, second] = b * math.cos(angle) + a * math.sin(angle)
    return rotated


def attention(
    tensors: Tensors, prefix: str, x: torch.Tensor, positions: list[int], allowed: torch.Tensor, shape: Shape
) -> torch.Tensor:
    """x [T, inputs] -> [T, hidden]; allowed bool [T, T]: row attends to column."""
    if f"{prefix}.kv_b_proj.weight" in tensors:
        return latent_attention(tensors, prefix, x, positions, allowed, shape)
    num_rows = x.shape[0]
    query = linear(tensors, f"{prefix}.q_proj", x).view(num_rows, shape.num_heads, shape.head_dim)
    key = linear(tensors, f"{prefix}.k_proj", x).view(num_rows, shape.num_kv_heads, shape.head_dim)
    value = linear(tensors, f"{prefix}.v_proj", x).view(num_rows, shape.num_kv_heads, shape.head_dim)
    if f"{prefix}.q_norm.weight" in tensors:
        query = mean_square_norm(query, tensors[f"{prefix}.q_norm.weight"], shape.eps)
        key = mean_square_norm(key, tensors[f"{prefix}.k_norm.weight"], shape.eps)
    query, key = rotate(query, positions, shape), rotate(key, positions, shape)
    out = torch.zeros(num_rows, shape.num_heads, shape.head_dim, dtype=x.dtype)
    for head in range(shape.num_heads):
        group = head * shape.num_kv_heads // shape.num_heads
        for row in range(num_rows):
            seen = allowed[row].nonzero()[:, 0]
            scores = key[seen, group] @ query[row, head] / math.sqrt(shape.head_dim)
            weights = torch.exp(scores - scores.max())
            out[row, head] = (weights / weights.sum()) @ value[seen, group]
    return linear(tensors, f"{prefix}.o_proj", out.reshape(num_rows, -1))


def latent_attention(
    tensors: Tensors, prefix: str, x: torch.Tensor, positions: list[int], allowed: torch.Tensor, shape: Shape
) -> torch.Tensor:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1); the latents' norms have an eps of 1e-6.

    With YaRN scores are scaled by (0.1 mscale_all_dim ln factor + 1) squared; queries by Llama 4's factor of position.
    """
    num_rows, heads = x.shape[0], shape.num_heads
    scaling = shape.rope_scaling or {}
    if f"{prefix}.q_a_proj.weight" in tensors:
        compressed = linear(tensors, f"{prefix}.q_a_proj", x)
        query = linear(
            tensors, f"{prefix}.q_b_proj", mean_square_norm(compressed, tensors[f"{prefix}.q_a_layernorm.weight"], 1e-6)
        )
    else:
        query = linear(tensors, f"{prefix}.q_proj", x)
    query = query.view(num_rows, heads, shape.key_dim + shape.head_dim)
    latent, shared = linear(tensors, f"{prefix}.kv_a_proj_with_mqa", x).split(
        [tensors[f"{prefix}.kv_b_proj.weight"].shape[1], shape.head_dim], dim=-1
    )
    latent = mean_square_norm(latent, tensors[f"{prefix}.kv_a_layernorm.weight"], 1e-6)
    both = linear(tensors, f"{prefix}.kv_b_proj", latent).view(num_rows, heads, shape.key_dim + shape.value_dim)
    query_part = rotate(query[..., shape.key_dim :], positions, shape)
    key_part = rotate(shared[:, None], positions, shape)
    scale = (shape.key_dim + shape.head_dim) ** -0.5
    scale *= (0.1 * scaling.get("mscale_all_dim", 0) * math.log(scaling.get("factor", 1)) + 1) ** 2
    out = torch.zeros(num_rows, heads, shape.value_dim, dtype=x.dtype)
    for row, position in enumerate(positions):
        grown = math.log(1 + position // scaling.get("original_max_position_embeddings", math.inf))
        for head in range(heads):
            seen = allowed[row].nonzero()[:, 0]
            scores = both[seen, head, : shape.key_dim] @ query[row, head, : shape.key_dim]
            scores = (scores + key_part[seen, 0] @ query_part[row, head]) * scale
            scores = scores * (1 + scaling.get("llama_4_scaling_beta", 0) * grown)
            weights = torch.exp(scores - scores.max())
            out[row, head] = (weights / weights.sum()) @ both[seen, head, shape.key_dim :]
    return linear(tensors, f"{prefix}.o_proj", out.reshape(num_rows, -1))


def feed_forward(tensors: Tensors, prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = linear(tensors, f"{prefix}.gate_proj", x), linear(tensors, f"{prefix}.up_proj", x)
    return linear(tensors, f"{prefix}.down_proj", silu(gate) * up)


def decoder_layer(
    tensors: Tensors,
    prefix: str,
    attention_input: torch.Tensor,
    residual: torch.Tensor,
    positions: list[int],
    allowed: torch.Tensor,
    shape: Shape,
) -> torch.Tensor:
    """Attention and MLP, each with its residual; what the attention reads is already normed."""
    x = residual + attention(tensors, f"{prefix}.self_attn", attention_input, positions, allowed, shape)
    normed = mean_square_norm(x, tensors[f"{prefix}.post_attention_layernorm.weight"], shape.eps)
    return x + feed_forward(tensors, f"{prefix}.mlp", normed)


def eagle1(
    tensors: Tensors,
    embedding: torch.Tensor,
    token_ids: list[int],
    features: torch.Tensor,
    positions: list[int],
    allowed: torch.Tensor,
    shape: Shape,
) -> torch.Tensor:
    """Features [T, H] paired with the tokens after them -> next features [T, H]."""
    x = linear(tensors, "fc", torch.cat((embedding[token_ids], features), -1))
    for index in range(shape.num_layers):
        prefix = f"layers.{index}"
        normed = x
        if index > 0 or shape.has_norms:
            normed = mean_square_norm(x, tensors[f"{prefix}.input_layernorm.weight"], shape.eps)
        x = decoder_layer(tensors, prefix, normed, x, positions, allowed, shape)
    return mean_square_norm(x, tensors["norm.weight"], shape.eps) if shape.has_norms else x


def eagle3_fuse(tensors: Tensors, hidden_states: list[torch.Tensor], eps: float) -> torch.Tensor:
    """Hidden states [T, H_target] of the tapped layers -> feature [T, H]."""
    names = [f"fc_norm.{place}.weight" for place in range(len(hidden_states))]
    if names[0] in tensors:
        pairs = zip(hidden_states, names, strict=True)
        hidden_states = [mean_square_norm(state, tensors[name], eps) for state, name in pairs]
    joined = torch.cat(hidden_states, -1)
    if "input_norm.weight" in tensors:
        joined = mean_square_norm(joined, tensors["input_norm.weight"], eps)
    return linear(tensors, "fc", joined)


def eagle3(
    tensors: Tensors,
    embedding: torch.Tensor,
    token_ids: list[int],
    features: torch.Tensor,
    positions: list[int],
    allowed: torch.Tensor,
    shape: Shape,
    *,
    norm_before_residual: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [T, H] -> (output before `norm`, logits [T, draft vocabulary]), both [T, ...]."""
    embedded = mean_square_norm(embedding[token_ids], tensors["layers.0.input_layernorm.weight"], shape.eps)
    normed = mean_square_norm(features, tensors["layers.0.hidden_norm.weight"], shape.eps)
    residual = normed if norm_before_residual else features
    joined = torch.cat((embedded, normed), -1)
    x = decoder_layer(tensors, "layers.0", joined, residual, positions, allowed, shape)
    for index in range(1, shape.num_layers):
        prefix = f"layers.{index}"
        normed = mean_square_norm(x, tensors[f"{prefix}.input_layernorm.weight"], shape.eps)
        x = decoder_layer(tensors, prefix, normed, x, positions, allowed, shape)
    return x, mean_square_norm(x, tensors["norm.weight"], shape.eps) @ tensors["lm_head.weight"].T


def medusa(
    blocks: list[list[tuple[torch.Tensor, torch.Tensor | None]]], lm_heads: list[torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    """blocks: per head, per layer (weight, bias); hidden [N, H] -> logits [N, heads, V]."""
    logits = []
    for layers, lm_head in zip(blocks, lm_heads, strict=True):
        x = hidden
        for weight, bias in layers:
            x = x + silu(x @ weight.T + (0 if bias is None else bias))
        logits.append(x @ lm_head.T)
    return torch.stack(logits, 1)


def mlp_speculator(
    tensors: Tensors, hidden: torch.Tensor, tokens: list[list[int]], inner_dim: int, *, is_tied: bool, scale_input: bool
) -> list[torch.Tensor]:
    """tokens: per step, one per row; returns the logits [N, V] of each step. Norm eps 1e-6."""
    n_predict = len(tokens)
    state_weight = 0.5 ** (0.5 / n_predict)
    emb_weight = math.sqrt((1 - state_weight**2) * inner_dim / 2)
    state = mean_square_norm(hidden, torch.ones(hidden.shape[-1]), 1e-6) / math.sqrt(2) if scale_input else hidden
    logits = []
    for step, token_ids in enumerate(tokens):
        index = 0 if is_tied else step
        projection = min(step, 1) if is_tied else step
        embedded = tensors[f"emb.{index}.weight"][token_ids]
        mixed = linear(tensors, f"proj.{projection}", state) + emb_weight / state_weight * embedded
        normed = mean_square_norm(mixed, tensors[f"ln.{index}.weight"], 1e-6) + tensors[f"ln.{index}.bias"]
        state = gelu(normed)
        logits.append(state @ tensors[f"head.{index}.weight"].T)
    return logits


def causal(num_rows: int) -> torch.Tensor:
    return torch.tril(torch.ones(num_rows, num_rows, dtype=torch.bool))


def doubled(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The same tensors in float64."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def block_outputs(
    tensors: Tensors,
    embedding: torch.Tensor,
    last_token: int,
    mask_token: int,
    num_rows: int,
    states: torch.Tensor,
    sees_later: list[bool],
    shape: Shape,
    window: int | None = None,
) -> torch.Tensor:
    """One-pass block heads (DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147): states [C, layers * H_target] of all
    positions before the block -> normed outputs [num_rows, H]. sees_later: per layer, of the block's own rows."""
    num_context = states.shape[0]
    context = mean_square_norm(linear(tensors, "fc", states), tensors["hidden_norm.weight"], shape.eps)
    x = embedding[[last_token, *[mask_token] * (num_rows - 1)]]
    positions = list(range(num_context + num_rows))
    for index, both_ways in enumerate(sees_later):
        prefix = f"layers.{index}"
        normed = mean_square_norm(x, tensors[f"{prefix}.input_layernorm.weight"], shape.eps)
        allowed = causal(num_context + num_rows)
        if both_ways:
            allowed[num_context:, num_context:] = True
        if window is not None:
            for row in range(num_context + num_rows):
                allowed[row, : max(0, row + 1 - window)] = False
        joined = torch.cat((context, normed))
        attended = attention(tensors, f"{prefix}.self_attn", joined, positions, allowed, shape)[num_context:]
        x = x + attended
        normed = mean_square_norm(x, tensors[f"{prefix}.post_attention_layernorm.weight"], shape.eps)
        x = x + feed_forward(tensors, f"{prefix}.mlp", normed)
    return mean_square_norm(x, tensors["norm.weight"], shape.eps)


def markov_memory(
    tensors: Tensors, kind: str, output: torch.Tensor, previous: int, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """DSpark's Markov head: (m, next state) after the token `previous`, before output [H]; state [rank]."""
    memory = tensors["markov_head.markov_w1.weight"][previous]
    if kind == "gated":
        gate = linear(tensors, "markov_head.gate_proj", torch.cat((output, memory)))
        return memory / (1 + torch.exp(-gate)), state
    if kind == "rnn":
        gate, candidate, out = linear(tensors, "markov_head.joint_proj", torch.cat((state, memory, output))).split(
            len(state)
        )
        keep = 1 / (1 + torch.exp(-gate))
        return torch.tanh(out), keep * state + (1 - keep) * torch.tanh(candidate)
    return memory, state
