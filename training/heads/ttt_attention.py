"""Attention for training-time test: each position attends as in service.

At step k that is the true-feature prefix up to its origin and its own k drafts.

Rows are indexed by origin: position t at step k is absolute position t+k, and its query and key have RoPE at t+k. Keys
of step 0 are visible causally, keys of steps 1..k only on the diagonal (their own origin): the mask of EAGLE-3 (Li et
al. 2025, arXiv 2503.01840, figure 6) and HASS (Zhang et al. 2024). As diagonals it costs one dot product per position
and step instead of a (k+1)T square. Uses transformers' attention interface:

  head = Eagle3Head(..., attn_implementation=TTT_ATTENTION)
  head(tokens, features, positions, ttt=TttCache())     the same cache for all steps of one batch
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

# transformers treats names with "flash", "sdpa" or "flex_attention" specially.
TTT_ATTENTION = "outrider_ttt"


@dataclass
class TttCache:
    """Keys and values of the steps so far: per layer a list of ([B, Hkv, T, D], [B, Hkv, T, Dv])."""

    layers: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)


def ttt_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    ttt: TttCache,
    **_ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Attends query [B, Hq, T, D] to key and value [B, Hkv, T, ...] of one step; returns ([B, T, Hq, Dv], None).

    attention_mask must be None: this function defines the mask.
    """
    if attention_mask is not None:
        raise ValueError("training-time test has its own mask; give attention_mask=None")
    # RoPE returns query and key in the residual stream's dtype; under autocast the value is narrower.
    query, key = query.to(value.dtype), key.to(value.dtype)
    steps = ttt.layers.setdefault(int(module.layer_idx), [])  # type: ignore[arg-type]
    steps.append((key, value))
    if len(steps) == 1:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    else:
        output = _attend(query, steps, scaling)
    return output.transpose(1, 2).contiguous(), None


def _attend(query: torch.Tensor, steps: list[tuple[torch.Tensor, torch.Tensor]], scaling: float) -> torch.Tensor:
    num_positions, repeats = query.shape[2], query.shape[1] // steps[0][0].shape[1]
    keys = [key.repeat_interleave(repeats, dim=1) for key, _ in steps]
    values = [value.repeat_interleave(repeats, dim=1) for _, value in steps]
    causal = torch.ones(num_positions, num_positions, dtype=torch.bool, device=query.device).tril()
    prefix = (query @ keys[0].transpose(2, 3)).float().masked_fill(~causal, float("-inf"))
    own = [(query.float() * key.float()).sum(-1, keepdim=True) for key in keys[1:]]
    weights = torch.softmax(torch.cat([prefix, *own], dim=-1) * scaling, dim=-1).to(query.dtype)
    output = weights[..., :num_positions] @ values[0]
    for step, value in enumerate(values[1:]):
        output = output + weights[..., num_positions + step, None] * value
    return output


def register_ttt_attention() -> None:
    """Registers TTT_ATTENTION with transformers; may be called again."""
    AttentionInterface.register(TTT_ATTENTION, ttt_attention)
