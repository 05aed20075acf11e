"""IBM's MLP speculator (Wertheimer et al. 2024, arXiv:2404.19124): a small recurrent net over draft tokens.

    s_0     = norm(h) / sqrt(2) if scale_input else h       (norm without weights)
    s_{i+1} = GELU(ln_i(proj_i(s_i) + (emb_weight / state_weight) * emb_i(token_i)))
    logits  = head_i(s_{i+1})
with state_weight = 0.5 ** (0.5 / n_predict) and emb_weight = sqrt((1 - state_weight ** 2) * inner_dim / 2); every norm
is an RMS norm (eps 1e-6). h is the target's last hidden state at position t, token_0 is token t + 1, and step i gives
logits for token t + 2 + i. Not here: checkpoints, and sampling the tokens (drafting.methods).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers.activations import ACT2FN

from outrider.drafting.heads.errors import HeadConfigError, require_positive

NORM_EPS = 1e-6


@dataclass(frozen=True)
class MlpSpeculatorConfig:
    """The config of an MLP speculator, with the keys of the public config.json."""

    vocab_size: int
    emb_dim: int  # hidden size of the target
    inner_dim: int = 0  # 0: emb_dim
    n_predict: int = 3
    n_candidates: int = 5
    top_k_tokens_per_head: tuple[int, ...] = ()  # (): one token per head
    tie_weights: bool = False
    scale_input: bool = False

    def __post_init__(self) -> None:
        sizes = {"vocab_size": self.vocab_size, "emb_dim": self.emb_dim, "n_predict": self.n_predict}
        require_positive("mlp_speculator", **sizes, n_candidates=self.n_candidates)
        if self.inner_dim < 0:
            raise HeadConfigError(f"mlp_speculator: inner_dim={self.inner_dim} is below 0", param="inner_dim")
        if not self.top_k_tokens_per_head:
            object.__setattr__(self, "top_k_tokens_per_head", (1,) * self.n_predict)
        if len(self.top_k_tokens_per_head) != self.n_predict:
            lengths = f"has {len(self.top_k_tokens_per_head)} entries, n_predict is {self.n_predict}"
            raise HeadConfigError(f"mlp_speculator: top_k_tokens_per_head {lengths}", param="top_k_tokens_per_head")
        if self.tie_weights and self.n_predict < 2:
            raise HeadConfigError("mlp_speculator: tie_weights with n_predict=1 ties nothing", param="tie_weights")

    @property
    def width(self) -> int:
        """Returns the width of the state after the first step."""
        return self.inner_dim or self.emb_dim


class MeanSquareNorm(nn.Module):
    """Maps x [..., width] -> x / sqrt(mean(x ** 2) + eps), times weight plus bias; statistics in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * mean_square_norm(x) + self.bias


def mean_square_norm(x: torch.Tensor) -> torch.Tensor:
    """Divides x [..., width] by the root of its mean square."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + NORM_EPS)).to(x.dtype)


class MlpSpeculator(nn.Module):
    """The MLP speculator. State dict: `emb.{i}.weight`, `proj.{i}.weight`, `ln.{i}.{weight,bias}`, `head.{i}.weight`.

    With tied weights there is only index 0, plus proj.1 for all steps after the first.
    """

    def __init__(self, config: MlpSpeculatorConfig) -> None:
        super().__init__()
        self.config = config
        width, vocab_size = config.width, config.vocab_size
        num_distinct = 1 if config.tie_weights else config.n_predict
        num_projections = 2 if config.tie_weights else config.n_predict
        self.emb = nn.ModuleList([nn.Embedding(vocab_size, width) for _ in range(num_distinct)])
        self.proj = nn.ModuleList(
            [nn.Linear(width if i else config.emb_dim, width, bias=False) for i in range(num_projections)]
        )
        self.ln = nn.ModuleList([MeanSquareNorm(width) for _ in range(num_distinct)])
        self.head = nn.ModuleList([nn.Linear(width, vocab_size, bias=False) for _ in range(num_distinct)])
        # transformers' module (exact GELU), which engine.model.row_invariance knows.
        self.activation = ACT2FN["gelu"]
        state_weight = 0.5 ** (0.5 / config.n_predict)
        emb_weight = math.sqrt((1 - state_weight**2) * width / 2)
        self._emb_scale = emb_weight / state_weight
        for module in (*self.emb, *self.proj, *self.head):  # the reference's initialisation
            nn.init.normal_(module.weight, 0.0, 1 / math.sqrt(width))

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden [N, emb_dim], the target's last hidden state -> state [N, emb_dim]."""
        return mean_square_norm(hidden) / math.sqrt(2) if self.config.scale_input else hidden

    def advance(self, state: torch.Tensor, token_ids: torch.Tensor, head: int) -> torch.Tensor:
        """Maps state [N, width] ([N, emb_dim] for head 0), token_ids int64 [N] -> next state [N, width].

        Raises HeadConfigError unless 0 <= head < n_predict.
        """
        if not 0 <= head < self.config.n_predict:
            raise HeadConfigError(f"mlp_speculator: head {head} is outside [0, {self.config.n_predict})", param="head")
        index = 0 if self.config.tie_weights else head
        projected = self.proj[min(head, 1) if self.config.tie_weights else head](state)
        mixed = projected + self._emb_scale * self.emb[index](token_ids)
        return self.activation(self.ln[index](mixed))  # type: ignore[no-any-return]

    def output_head(self, head: int) -> nn.Module:
        """Returns the linear from the state [N, width] after `advance` of `head` to logits [N, V]."""
        return self.head[0 if self.config.tie_weights else head]

    def step(self, state: torch.Tensor, token_ids: torch.Tensor, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs `advance`, then computes the logits: next state [N, width], logits [N, V]."""
        state = self.advance(state, token_ids, head)
        return state, self.output_head(head)(state)
