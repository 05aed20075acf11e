"""Passes Llama 4's chunk sizes and query scales to the attention function; transformers uses masks and counters.

A layer with rotation sees chunks, which transformers puts into its mask; one without scales its queries by the number
of a row in the batch, not by its position. A hook on each decoder layer passes both to the attention function instead.
Not here: what the attention function does with them (engine/attention/layer), and chunks in kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outrider.engine.attention.layer import AttentionProbe, PagedContext
from outrider.engine.attention.ops import AttentionOps
from outrider.engine.model.lean import lean_check

ATTENTION_CLASS = "Llama4TextAttention"
# rows; length of the proof
_NUM_ROWS = 7
# positions; floor_scale of the proof, so that its queries have four different scales
_PROOF_FLOOR_SCALE = 2


@dataclass(frozen=True)
class QueryScale:
    """Attention temperature by position (https://huggingface.co/papers/2501.19399, as Llama 4 has it)."""

    strength: float
    floor_scale: float  # positions

    def at(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Returns the factors of the queries, fp32 [1, T]; position_ids [1, T]."""
        steps = torch.floor((position_ids.float() + 1.0) / self.floor_scale)
        return torch.log1p(steps) * self.strength + 1.0


def adapt_attention(layer: torch.nn.Module, attention: Any, layer_type: str) -> None:
    """Makes a decoder layer pass its chunk size or the scales of its queries to its attention function.

    Raises ValueError for a layer of chunks without their size.
    """
    chunk_size: int | None = None
    if layer_type == "chunked_attention":
        chunk_size = attention.config.attention_chunk_size
        if not isinstance(chunk_size, int):
            raise ValueError("its config has no attention_chunk_size")
    scale: QueryScale | None = None
    if attention.attn_temperature_tuning and not attention.use_rope:
        scale = QueryScale(float(attention.attn_scale), float(attention.floor_scale))
    attention.attn_temperature_tuning = False

    def pass_on(
        _layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        scales = None if scale is None else scale.at(kwargs["position_ids"])
        return args, kwargs | {"chunk_size": chunk_size, "query_scales": scales}

    layer.register_forward_pre_hook(pass_on, with_kwargs=True)


class _QueryProbe(AttentionProbe):
    """Keeps the query of its last hook call."""

    query: torch.Tensor | None = None

    def record(
        self, module: torch.nn.Module, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *others: Any
    ) -> torch.Tensor:
        self.query = tensors[0]
        return super().record(module, tensors, *others)


def prove_attention(module: Any, ops: AttentionOps) -> None:
    """Raises ValueError if a transformers module, in fp32 and without rotation, scales its queries in another way."""
    module.attn_temperature_tuning, module.floor_scale = True, _PROOF_FLOOR_SCALE
    rows = torch.randn((1, _NUM_ROWS, module.q_proj.in_features), generator=torch.Generator().manual_seed(11))

    def query_of(scales: torch.Tensor | None) -> torch.Tensor | None:
        probe = _QueryProbe({})
        context = PagedContext(ops, probe=probe)
        module(rows, position_embeddings=None, attention_mask=None, paged=context, query_scales=scales)
        return probe.query

    theirs = query_of(None)
    module.attn_temperature_tuning = False
    scale = QueryScale(float(module.attn_scale), _PROOF_FLOOR_SCALE)
    if theirs is None or not lean_check.is_close(query_of(scale.at(torch.arange(_NUM_ROWS)[None])), theirs):
        raise ValueError("its queries are scaled in another way")
