"""Runs an EAGLE head or MTP layer over its own outputs, as in service: step k reads the features of step k-1.

Tokens are the text's own at every step (acceptance is conditioned on them), features only at step 0. Not here: losses
(eagle.py, eagle3.py, mtp.py) and the attention that needs one pass per step (ttt_attention.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from outrider.drafting.heads.decoder import DecoderConfig
from outrider.drafting.heads.eagle import EagleHead
from outrider.drafting.heads.eagle3 import Eagle3Head
from outrider.drafting.heads.mtp import MtpHead
from outrider.training.errors import SettingError
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.options import HeadOptions
from outrider.training.heads.ttt_attention import TttCache

# steps; number of depths in the acceptance estimates of eval mode
EVAL_DEPTHS = 5


def unroll(
    head: EagleHead | Eagle3Head | MtpHead, token_ids: torch.Tensor, features: torch.Tensor, num_steps: int
) -> Iterator[torch.Tensor]:
    """Yields the head's output [B, T-2, H] of each step, for rows int64[B, T] and fused features [B, >= T-2, H].

    The head must have been built with TTT_ATTENTION. Row t of step k is the feature of absolute position t+k+1, which
    predicts token t+k+2. Steps that read past the row's end read id 0; nothing counted depends on it.
    """
    num_positions = token_ids.shape[1] - 2
    positions = torch.arange(num_positions, device=token_ids.device).expand(len(token_ids), -1)
    padded, cache, state = F.pad(token_ids, (0, num_steps)), TttCache(), features[:, :num_positions]
    for step in range(num_steps):
        tokens = padded[:, 1 + step : 1 + step + num_positions]
        state = head(tokens, state, positions + step, ttt=cache)
        yield state


def decoder_config(options: HeadOptions, target: FrozenTarget) -> DecoderConfig:
    """Builds the config of the head's decoder: the target's widths, head size and RoPE.

    Raises SettingError for an impossible number of attention heads.
    """
    config = target.config
    num_heads = options.num_attention_heads or int(config.num_attention_heads)
    heads_per_kv = int(config.num_attention_heads) // int(
        getattr(config, "num_key_value_heads", num_heads) or num_heads
    )
    if num_heads % heads_per_kv:
        raise SettingError(f"--num-attention-heads {num_heads}: must be a multiple of {heads_per_kv}")
    head_dim = getattr(config, "head_dim", None) or target.hidden_size // int(config.num_attention_heads)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    return DecoderConfig(
        hidden_size=target.hidden_size,
        intermediate_size=options.intermediate_size
        or int(getattr(config, "intermediate_size", 4 * target.hidden_size)),
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // heads_per_kv,
        head_dim=int(head_dim),
        vocab_size=target.vocab_size,
        num_hidden_layers=options.num_layers or 1,
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        max_position_embeddings=int(config.max_position_embeddings),
        rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta") or 10000.0)},
    )
