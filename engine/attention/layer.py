"""Paged attention behind transformers' attention interface.

A model loaded with `attn_implementation=ATTENTION_NAME` calls `paged_attention_hook` once per layer; keyword arguments
of the model, such as `paged=PagedContext(...)`, reach it.
Not here: the kernels (kernels/paged_attention, kernels/kv_write) and the model code (transformers).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from outrider.engine.attention.batch import ForwardBatch
from outrider.engine.attention.choice import EVERYTHING, INDEX_DIM, Choice, Rule, VisibleKeys, by_head, choose
from outrider.engine.attention.latent import LATENT_HEADS, LatentHeads
from outrider.engine.attention.ops import AttentionOps, LayerShape
from outrider.engine.attention.paged_kv import PagedKVCache
from outrider.engine.errors import EngineError
from outrider.engine.recurrent.states import RecurrentShape, RecurrentStates
from outrider.kernels.paged_attention.arguments import Scoring
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows

# transformers interprets names with "flash", "sdpa", "flex_attention", "paged|" or "org/name".
ATTENTION_NAME = "outrider_paged"

# Arguments of attention functions that do not change what paged attention computes.
_HARMLESS_ARGUMENTS = frozenset(
    {
        "cache_position",
        "dropout",
        "head_mask",
        "is_causal",
        "layer_type",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class UnsupportedAttention(EngineError):
    """A model needs an attention function that the paged kernels do not compute."""


@dataclass
class AttentionProbe:
    """Replaces the cache in the probe forward: records each layer's hook call, and each recurrent mixer's."""

    module_names: dict[int, str]  # id(module) -> name
    layers: dict[int, LayerShape] = field(default_factory=dict)
    num_calls: int = 0
    mixers: list[RecurrentShape] = field(default_factory=list)

    def record(
        self,
        module: torch.nn.Module,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        scoring: Scoring,
        other_arguments: dict[str, Any],
    ) -> torch.Tensor:
        """Checks and records one hook call; returns zeros of the output's shape [1, T, Hq, Dv]."""
        query, key, value = tensors
        name = self.module_names.get(id(module), type(module).__name__)
        unknown = sorted(
            argument
            for argument, given in other_arguments.items()
            if given is not None and argument not in _HARMLESS_ARGUMENTS
        )
        if unknown:
            raise UnsupportedAttention(f"{name} passes {', '.join(unknown)} to its attention function")
        if attention_mask is not None:
            raise UnsupportedAttention(f"{name} passes a mask or bias of its own to its attention function")
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedAttention(f"{name} is not causal")
        layer_idx = getattr(module, "layer_idx", None)
        if not isinstance(layer_idx, int):
            raise UnsupportedAttention(f"{name} has no layer_idx")
        if query.ndim != 4 or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
            raise UnsupportedAttention(f"{name} attends with query {list(query.shape)}, key {list(key.shape)}")
        self.num_calls += 1
        self.layers[layer_idx] = LayerShape(
            name, query.shape[1], key.shape[1], key.shape[3], value.shape[3],
            scoring.sliding_window, scoring.chunk_size, values_in_keys=hasattr(module, LATENT_HEADS),
            index_dim=getattr(module, INDEX_DIM, 0),
        )  # fmt: skip
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))

    def record_mixer(self, shape: RecurrentShape) -> None:
        """Records one call of a recurrent mixer."""
        self.mixers.append(shape)


@dataclass(frozen=True)
class PagedContext:
    """The arguments of every layer's hook. The probe forward has a probe, and neither batch nor cache."""

    ops: AttentionOps
    batch: ForwardBatch | None = None
    cache: PagedKVCache | None = None
    probe: AttentionProbe | None = None
    plans: dict[Any, Any] = field(default_factory=dict)  # kept by the attention kernel between layers
    states: RecurrentStates | None = None  # only for a model with recurrent layers

    @functools.cached_property
    def visible(self) -> VisibleKeys:
        """Returns what the rows of the batch see, for all layers that choose of it."""
        if self.batch is None or self.cache is None:
            raise EngineError("a choice of keys needs a batch and a cache")
        return VisibleKeys(self.batch.attention_tables, self.cache.block_size)

    def layer_states(self, state_idx: int) -> tuple[LayerStates, RecurrentRows]:
        """Returns the arguments of a recurrent mixer's kernel. Raises EngineError if the forward has no states."""
        if self.states is None or self.batch is None or self.batch.recurrent is None:
            raise EngineError("a forward of a model with recurrent layers needs its sessions' states")
        return self.states.layers[state_idx], self.batch.recurrent


@dataclass(frozen=True)
class IndexerCall:
    """Stands in for the mask that transformers slices, and for its cache: what it gives to an attention's indexer."""

    paged: PagedContext
    layer_idx: int

    def __getitem__(self, _part: object) -> IndexerCall:
        return self

    def update(self, key: torch.Tensor, value: torch.Tensor, _layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what a cache would have kept: our attention writes it."""
        return key, value

    def choose(self, query: torch.Tensor, weights: torch.Tensor, key: torch.Tensor, rule: Rule) -> Choice:
        """Writes the indexer's key [T, D], then chooses for query [T, C, H, D] and weights [T, C, H], both fp32."""
        paged = self.paged
        batch, cache, index_scores = paged.batch, paged.cache, paged.ops.index_scores
        if paged.probe is not None:
            return EVERYTHING
        if batch is None or cache is None or index_scores is None:
            raise EngineError("an indexer needs a batch, a cache and a backend that scores keys")
        index_cache, rows = cache.index_keys[self.layer_idx], key.to(cache.dtype)[:, None]
        paged.ops.kv_write(rows, rows, index_cache, index_cache, batch.slot_mapping)
        tables, num_kv_heads = batch.attention_tables, cache.layers[self.layer_idx][0].shape[1]
        lengths = tables.context_lens + tables.query_starts.diff()
        if not len(lengths) or int(lengths.max()) <= rule.num_chosen:
            return EVERYTHING
        return choose(query, weights, index_cache, paged.visible, rule, index_scores, num_kv_heads)


def paged_attention_hook(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | IndexerCall | None,
    *,
    scaling: float,
    paged: PagedContext,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    chunk_size: int | None = None,
    query_scales: torch.Tensor | None = None,
    indices: Choice | torch.Tensor | None = None,
    block_indices: Choice | torch.Tensor | None = None,
    **other_arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attends query [1, Hq, T, D] to key and value [1, Hkv, T, D], rotated; returns ([1, T, Hq, Dv], None).

    `scaling` and `paged` have no default: a model that does not forward its keyword arguments must fail. chunk_size and
    query_scales, fp32 [1, T], come from engine/model/llama4; no transformers model passes them. indices, block_indices:
    the choice of our indexer (engine/model/sparse_indexer).
    """
    scoring = Scoring(scaling, sliding_window, softcap, s_aux, chunk_size)
    if query_scales is not None:
        query = (query * query_scales[:, None, :, None]).to(query.dtype)
    heads: LatentHeads | None = getattr(module, LATENT_HEADS, None)
    if heads is not None:
        query = heads.absorb(query)
    given = indices if block_indices is None else block_indices
    choice = given if isinstance(given, Choice) else EVERYTHING
    if paged.probe is not None:
        mask = None if isinstance(attention_mask, IndexerCall) else attention_mask
        others = other_arguments | ({} if given is choice else {"indices": given})
        attended = paged.probe.record(module, (query, key, value), mask, scoring, others)
    else:
        attended = attend(
            paged,
            int(module.layer_idx),  # type: ignore[arg-type]
            (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)),
            scoring,
            choice,
        )[None]
    return (attended if heads is None else heads.expand(attended)), None


def attend(
    paged: PagedContext,
    layer_idx: int,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scoring: Scoring,
    choice: Choice = EVERYTHING,
) -> torch.Tensor:
    """Writes key [T, Hkv, D] and value [T, Hkv, Dv], then attends query [T, Hq, D]; returns [T, Hq, Dv]."""
    batch, cache = paged.batch, paged.cache
    if batch is None or cache is None:
        raise EngineError("a paged forward needs a batch and a cache")
    query, key, value = tensors
    key_cache, value_cache = cache.layers[layer_idx]
    paged.ops.kv_write(key, value, key_cache, value_cache, batch.slot_mapping)
    tables, plans = batch.attention_tables, paged.plans
    attention: Callable[..., torch.Tensor] = paged.ops.paged_attention
    heads = query.shape[:2]
    if choice.tables is not None:
        tables, plans = choice.tables, choice.plans
        query = query.reshape(len(query) * key.shape[1], -1, query.shape[2])
        key_cache, value_cache = by_head(key_cache), by_head(value_cache)
    kept = {"plans": plans} if paged.ops.takes_plans else {}
    return attention(query, key_cache, value_cache, tables, scoring, **kept).view(*heads, -1)


def register_attention() -> None:
    """Registers ATTENTION_NAME with transformers. Safe to call again.

    No mask is registered, so transformers makes none: the kernel handles causality, windows and trees.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention_hook)
