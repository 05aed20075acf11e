"""Medusa heads (Cai et al. 2024, arXiv:2401.10774, section 2.1): head i predicts the token i + 2 positions ahead.

Head i reads the target's last hidden state at position t, from which the target predicts token t + 1, and gives logits
for token t + i + 2 (i from 0). Each head has `num_layers` residual blocks x + SiLU(W x + b), then a projection to the
vocabulary: one per head, or a single frozen one (the target's own).
Not here: checkpoints, and drafting with the predictions (drafting.methods).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers.activations import ACT2FN

from outrider.drafting.heads.errors import HeadConfigError, require_positive, require_shape
from outrider.drafting.heads.frozen import build_lm_head


@dataclass(frozen=True)
class MedusaConfig:
    """The config of Medusa heads.

    head_vocab_size < vocab_size: the heads have part of the target's vocabulary, given by a token map.
    """

    hidden_size: int
    vocab_size: int  # of the target
    num_heads: int
    num_layers: int = 1  # residual blocks per head
    has_bias: bool = True
    head_vocab_size: int = 0  # 0: the target's
    shares_lm_head: bool = False  # one frozen projection for all heads, given to the constructor

    def __post_init__(self) -> None:
        if self.head_vocab_size == 0:
            object.__setattr__(self, "head_vocab_size", self.vocab_size)
        require_positive(
            "medusa",
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            head_vocab_size=self.head_vocab_size,
        )
        if self.head_vocab_size > self.vocab_size:
            sizes = f"head_vocab_size={self.head_vocab_size} is above vocab_size={self.vocab_size}"
            raise HeadConfigError(f"medusa: {sizes}", param="head_vocab_size")


class ResidualBlock(nn.Module):
    """Maps x [..., H] -> x + SiLU(W x + b), `num_layers` times."""

    def __init__(self, hidden_size: int, num_layers: int, has_bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden_size, hidden_size, bias=has_bias) for _ in range(num_layers)])
        # transformers' module, which engine.model.row_invariance knows.
        self.activation = ACT2FN["silu"]
        with torch.no_grad():  # as the reference: blocks start as the identity
            for parameter in self.layers.parameters():
                parameter.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.activation(layer(x))
        return x


class MedusaHeads(nn.Module):
    """All Medusa heads. State dict: `blocks.{i}.layers.{j}.{weight,bias}`, `lm_heads.{i}.weight`, `token_map`.

    lm_head: [head_vocab_size, hidden_size], the target's. With config.shares_lm_head it is used frozen and outside the
    state dict; else it initialises every head's own.
    token_map: int64 [head_vocab_size], the target id of each head id; needed for a reduced vocabulary.
    Raises HeadConfigError for tensors that do not match the config.
    """

    lm_heads: nn.ModuleList | None
    lm_head: nn.Linear | None
    token_map: torch.Tensor | None

    def __init__(
        self, config: MedusaConfig, *, lm_head: torch.Tensor | None = None, token_map: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.config = config
        shape = (config.head_vocab_size, config.hidden_size)
        if token_map is None and config.head_vocab_size < config.vocab_size:
            sizes = f"{config.head_vocab_size} of {config.vocab_size} tokens"
            raise HeadConfigError(f"medusa: heads over {sizes} need a token_map", param="token_map")
        if token_map is not None:
            require_shape("medusa", "token_map", token_map.shape, shape[:1])
        self.blocks = nn.ModuleList(
            [ResidualBlock(config.hidden_size, config.num_layers, config.has_bias) for _ in range(config.num_heads)]
        )
        if config.shares_lm_head:
            self.lm_head = build_lm_head("medusa", shape, has_own=False, target=lm_head)
            self.lm_heads = None
        else:
            heads = [build_lm_head("medusa", shape, has_own=True, target=lm_head) for _ in range(config.num_heads)]
            self.lm_head, self.lm_heads = None, nn.ModuleList(heads)
        self.register_buffer("token_map", token_map)

    def output_head(self, head: int) -> nn.Linear:
        """Returns the linear from the features [N, hidden_size] of block `head` to logits [N, head_vocab_size]."""
        return self.lm_head if self.lm_heads is None else self.lm_heads[head]  # type: ignore[return-value]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden [N, hidden_size] -> logits [N, num_heads, head_vocab_size]."""
        features = [block(hidden) for block in self.blocks]
        if self.lm_head is not None:
            return self.lm_head(torch.stack(features, dim=-2))  # type: ignore[no-any-return]
        heads = self.lm_heads or ()
        return torch.stack([head(x) for head, x in zip(heads, features, strict=True)], dim=-2)
