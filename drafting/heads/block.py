"""One-pass block heads: DFlash (arXiv:2602.06036), DSpark (arXiv:2607.05147) and JetSpec (arXiv:2606.18394).

A decoder of Qwen3's kind whose every layer attends to keys and values of two sources: those made once from the target's
hidden states of all positions before the block, and those of the block itself, [last committed token, mask, mask, ...].
All tokens of a draft come from one forward of the block.

    context   c_i = hidden_norm(fc([h_i of each feature layer])),  K_i = RoPE_i(k_norm(k_proj c_i)),  V_i = v_proj c_i
    block     e = e + attention(input_layernorm(e); context, block),  e = e + mlp(post_attention_layernorm(e))
    outputs   logits = lm_head(norm(e)) + bias of the token before (DSpark's Markov head)

Row r of the block stands at position p + r, where the last committed token has position p. It predicts the token after
it if the head predicts from its anchor (DSpark), else the token at its own position (DFlash, JetSpec), so that row 0
predicts nothing. Inside the block a layer sees all rows, or only those up to its own.
Not here: checkpoints, drafting (drafting.methods.block), training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outrider.drafting.heads.decoder import DecoderConfig, Float32RotaryEmbedding, build_layer, rms_norm
from outrider.drafting.heads.draft_vocabulary import DraftVocabularyHead
from outrider.drafting.heads.errors import HeadConfigError, require_positive
from outrider.drafting.heads.frozen import build_embedding, build_lm_head

MARKOV_KINDS = ("vanilla", "gated", "rnn")
# Arguments of the attention function of layers that are causal inside the block (True), and of those that are not.
AttentionArguments = Callable[[bool], Mapping[str, Any]]


@dataclass(frozen=True)
class BlockConfig:
    """The config of a block head.

    feature_layers: hidden states in transformers' numbering. block_size: most rows of a block in training. causal: per
    layer, whether its rows see only those up to their own. Sizes of 0 mean the decoder's; markov_rank 0: no bias.
    """

    decoder: DecoderConfig
    feature_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    causal: tuple[bool, ...]
    predicts_from_anchor: bool = False
    sliding_window: int | None = None  # of the layers in `sliding`
    sliding: tuple[bool, ...] = ()
    draft_vocab_size: int = 0
    target_hidden_size: int = 0
    markov_rank: int = 0
    markov_kind: str = "vanilla"
    has_embedding: bool = False  # an embedding of its own instead of the target's
    has_lm_head: bool = True

    def __post_init__(self) -> None:
        if self.draft_vocab_size == 0:
            object.__setattr__(self, "draft_vocab_size", self.decoder.vocab_size)
        if self.target_hidden_size == 0:
            object.__setattr__(self, "target_hidden_size", self.decoder.hidden_size)
        if not self.sliding:
            object.__setattr__(self, "sliding", (False,) * self.decoder.num_hidden_layers)
        sizes = {"draft_vocab_size": self.draft_vocab_size, "target_hidden_size": self.target_hidden_size}
        require_positive("block head", **sizes, num_feature_layers=len(self.feature_layers))
        if self.max_num_draft_tokens < 1:
            raise HeadConfigError(f"block head: block_size={self.block_size} drafts nothing", param="block_size")
        if self.draft_vocab_size > self.decoder.vocab_size:
            above = f"draft_vocab_size={self.draft_vocab_size} is above vocab_size={self.decoder.vocab_size}"
            raise HeadConfigError(f"block head: {above}", param="draft_vocab_size")
        for name, found in (("causal", self.causal), ("sliding", self.sliding)):
            if len(found) != self.decoder.num_hidden_layers:
                cause = f"{len(found)} entries of {name} for {self.decoder.num_hidden_layers} layers"
                raise HeadConfigError(f"block head: {cause}", param=name)
        if any(self.sliding) and not (self.sliding_window or 0) > 0:
            cause = f"sliding_window={self.sliding_window} for sliding layers"
            raise HeadConfigError(f"block head: {cause}", param="sliding_window")
        if self.markov_rank < 0 or self.markov_kind not in MARKOV_KINDS:
            cause = f"a {self.markov_kind} Markov head of rank {self.markov_rank}; kinds are {', '.join(MARKOV_KINDS)}"
            raise HeadConfigError(f"block head: {cause}", param="markov_rank")

    @property
    def max_num_draft_tokens(self) -> int:
        return self.block_size - self.num_silent_rows

    @property
    def num_silent_rows(self) -> int:
        """Returns the number of leading block rows that predict nothing."""
        return 0 if self.predicts_from_anchor else 1

    def num_block_rows(self, num_draft_tokens: int) -> int:
        """Returns the rows to run for a draft of this length.

        A layer that sees all rows has only ever seen whole blocks: a short one is another input to it. Below half the
        block its cost weighs more.
        """
        needed = num_draft_tokens + self.num_silent_rows
        return needed if all(self.causal) or 2 * num_draft_tokens <= self.block_size else self.block_size


class BlockLayer(nn.Module):
    """A plain decoder layer whose attention also reads the context's rows."""

    def __init__(self, config: BlockConfig, hf_config: Any, index: int) -> None:
        super().__init__()
        plain: Any = build_layer(config.decoder, hf_config, index)
        self.input_layernorm = plain.input_layernorm
        self.self_attn = plain.self_attn
        self.self_attn.sliding_window = config.sliding_window if config.sliding[index] else None
        self.post_attention_layernorm = plain.post_attention_layernorm
        self.mlp = plain.mlp

    def forward(self, block: torch.Tensor, context: torch.Tensor, **attention_kwargs: Any) -> torch.Tensor:
        """Maps block rows [B, N, H] -> [B, N, H]; context [B, C, H] is read as it is."""
        num_rows = block.shape[1]
        if num_rows == 0:  # context alone: its keys and values are all that is wanted
            self.self_attn(hidden_states=context, **attention_kwargs)
            return block
        rows = _join_rows(self.input_layernorm(block), context)
        block = block + self.self_attn(hidden_states=rows, **attention_kwargs)[0][:, :num_rows]
        return block + self.mlp(self.post_attention_layernorm(block))  # type: ignore[no-any-return]


class MarkovHead(nn.Module):
    """DSpark's bias of the next token by the one before: W2 m, with m from that token's row of W1 (section 2)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank, hidden_size = config.markov_rank, config.decoder.hidden_size
        self.markov_w1 = nn.Embedding(config.decoder.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if config.markov_kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank) if config.markov_kind == "rnn" else None

    def memory(
        self, outputs: torch.Tensor, previous_ids: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Maps outputs [N, H] and the tokens before them, int64 [N], -> m [N, rank], and the next token's state."""
        previous = self.markov_w1(previous_ids)
        if self.gate_proj is not None:
            return torch.sigmoid(self.gate_proj(torch.cat((outputs, previous), dim=-1))) * previous, None
        if self.joint_proj is not None:
            state = torch.zeros_like(previous) if state is None else state
            gate, candidate, output = self.joint_proj(torch.cat((state, previous, outputs), dim=-1)).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            return torch.tanh(output), state
        return previous, None


class BlockHead(DraftVocabularyHead):
    """The block head. State dict: the names of public checkpoints (`fc`, `hidden_norm`, `layers.*`, `markov_head.*`).

    embedding [vocab_size, hidden_size], lm_head [draft_vocab_size, hidden_size]: the target's. If the config gives the
    head none of its own, they are used frozen and outside the state dict; else they initialise its own.
    d2t: int64 [draft_vocab_size], target id minus draft id; needed for a reduced draft vocabulary.
    Raises HeadConfigError.
    """

    config: BlockConfig

    def __init__(
        self,
        config: BlockConfig,
        *,
        embedding: torch.Tensor | None = None,
        lm_head: torch.Tensor | None = None,
        d2t: torch.Tensor | None = None,
        attn_implementation: str = "sdpa",
    ) -> None:
        super().__init__()
        decoder, eps = config.decoder, config.decoder.rms_norm_eps
        self.config = config
        self.hf_config = decoder.to_transformers(attn_implementation)
        self.set_draft_vocabulary("block head", d2t)
        shape = (decoder.vocab_size, decoder.hidden_size)
        self.embed_tokens = build_embedding("block head", shape, has_own=config.has_embedding, target=embedding)
        width = len(config.feature_layers) * config.target_hidden_size
        self.fc = nn.Linear(width, decoder.hidden_size, bias=False)
        self.hidden_norm = rms_norm(decoder.hidden_size, eps)
        layers = [BlockLayer(config, self.hf_config, index) for index in range(decoder.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.rotary_emb = Float32RotaryEmbedding(self.hf_config)
        self.norm = rms_norm(decoder.hidden_size, eps)
        head_shape = (config.draft_vocab_size, decoder.hidden_size)
        self.lm_head = build_lm_head("block head", head_shape, has_own=config.has_lm_head, target=lm_head)
        self.markov_head = MarkovHead(config) if config.markov_rank else None

    def fuse(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps hidden_states [..., len(feature_layers) * target_hidden_size], in that order -> context [..., H]."""
        return self.hidden_norm(self.fc(hidden_states.to(self.embed_tokens.weight.dtype)))  # type: ignore[no-any-return]

    def forward(
        self, token_ids: torch.Tensor, context: torch.Tensor, position_ids: torch.Tensor, attention: AttentionArguments
    ) -> torch.Tensor:
        """Maps the blocks' token_ids int64 [B, N] and context [B, C, H] -> normed outputs [B, N, H].

        position_ids int64 [B, N + C]: of the block's rows, then of the context's, the order in which attention gets
        them.
        """
        block = self.embed_tokens(token_ids)
        context = context.to(block.dtype)
        position_embeddings = self.rotary_emb(block, position_ids)
        for layer, is_causal in zip(self.layers, self.config.causal, strict=True):
            block = layer(
                block,
                context,
                **({"attention_mask": None} | dict(attention(is_causal))),
                position_ids=position_ids,
                position_embeddings=position_embeddings,
            )
        return self.norm(block) if block.shape[1] else block  # type: ignore[no-any-return]

    def biased(
        self,
        logits: torch.Tensor,
        outputs: torch.Tensor,
        previous_ids: torch.Tensor,
        state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Adds the Markov bias of the tokens before, int64 [N], to lm_head's logits [N, draft_vocab_size] of outputs
        [N, H]. state: of the same path's token before; returned for the next one."""
        if self.markov_head is None:
            return logits, None
        memory, state = self.markov_head.memory(outputs, previous_ids, state)
        return logits + self.markov_head.markov_w2(memory), state


def _join_rows(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Joins [B, N, H] and [B, C, H] along the rows: as one long row each, which recorded forwards have a kernel for."""
    joined = torch.cat((left.flatten(-2), right.flatten(-2)), dim=-1)
    return joined.view(left.shape[0], -1, left.shape[-1])
