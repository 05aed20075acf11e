"""Drafts by Gemma 4's assistant (drafting.heads.assistant), which attends to the target's keys and values.

The cache has those of the committed positions, computed once from the target's hidden states. Draft tokens have none:
every step of a chain, and every node of a tree, attends to the same ones from the same position, with the feature of
the node above it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import torch

from outrider.drafting.growth.draft import Draft
from outrider.drafting.heads.assistant import AssistantHead
from outrider.drafting.methods.eagle import EagleNet
from outrider.drafting.paged.paged_head import PagedHead
from outrider.engine.attention.batch import ForwardBatch, SessionRows, build_batch
from outrider.engine.attention.block_manager import BlockManager
from outrider.engine.attention.layer import PagedContext, register_attention
from outrider.engine.attention.ops import AttentionOps, LayerShape
from outrider.engine.attention.paged_kv import PagedKVCache, bytes_per_block
from outrider.engine.model.row_invariance import make_row_invariant


class PagedAssistant(PagedHead):
    """An assistant over a paged cache of its target's keys and values. Not thread-safe."""

    head: AssistantHead

    def __init__(
        self,
        head: AssistantHead,
        ops: AttentionOps,
        dtype: torch.dtype,
        *,
        kv_cache_bytes: int,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Moves the head, built with attn_implementation=ATTENTION_NAME, to the device."""
        register_attention()
        self.head = head.to(device)
        self.dtype = dtype
        self.device = torch.device(device)
        self._ops = ops
        # The layers only read: what they are given is already in the cache.
        self._reading = dataclasses.replace(ops, kv_write=_write_nothing)
        decoder, sources = head.config.decoder, head.config.sources
        shapes = []
        for name, index in sources.items():
            layer = decoder.per_layer_config[index]
            shapes.append(LayerShape(name, 0, layer.num_key_value_heads, layer.head_dim, layer.head_dim, None))
        num_blocks = max(1, kv_cache_bytes // bytes_per_block(shapes, block_size, dtype))
        self._cache = PagedKVCache(
            shapes, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=self.device, ops=ops
        )
        self.blocks = BlockManager(num_blocks, block_size)
        self._by_type = dict(zip(sources, self._cache.layers, strict=True))
        self._of_layers = copy.copy(self._cache)
        self._of_layers.layers = [self._by_type[name] for name in head.config.layers.layer_types]
        make_row_invariant(head.model, ops.row_backend)
        make_row_invariant(head.keys, ops.row_backend)

    @torch.inference_mode()
    def forward(self, rows: Sequence[SessionRows], features: torch.Tensor) -> torch.Tensor:
        """Maps features [T, .] of all rows in order -> the layers' outputs [T, width].

        A chain of rows is of committed tokens, with the target's hidden states as features: their keys and values are
        written, and only the last row has an output. The rows of a tree have outputs of `forward` as features.
        """
        if all(part.num_chain_rows == 0 for part in rows):
            return self.attend(self.queries(rows), self.head.post_projection(features))
        batch = build_batch(rows, self.blocks.block_size, self.device)
        for name, (keys, values) in self.head.keys_and_values(features, batch.position_ids).items():
            self._ops.kv_write(keys, values, *self._by_type[name], batch.slot_mapping)
        last = [
            SessionRows(part.token_ids[-1:], part.context_len + len(part.token_ids) - 1, part.block_ids, 1)
            for part in rows
        ]
        ends = batch.query_starts[1:].long() - 1
        of_target = features[ends, -self.head.config.decoder.hidden_size :]
        found = self.attend(build_batch(last, self.blocks.block_size, self.device), of_target)
        return found.new_zeros((len(features), found.shape[1])).index_copy_(0, ends, found)

    def queries(self, rows: Sequence[SessionRows]) -> ForwardBatch:
        """Makes a batch of one-row sessions: each row of a tree attends to the committed positions alone."""
        parts = [SessionRows([token], part.context_len, part.block_ids, 1) for part in rows for token in part.token_ids]
        return build_batch(parts, self.blocks.block_size, self.device)

    @torch.inference_mode()
    def attend(self, batch: ForwardBatch, features: torch.Tensor) -> torch.Tensor:
        """Maps features [T, H] of one-row sessions at the last committed position -> outputs [T, width]."""
        count = len(features)
        given = {
            name: (keys.new_zeros((1, keys.shape[1], count, keys.shape[3])),) * 2
            for name, (keys, _values) in self._by_type.items()
        }
        paged = PagedContext(self._reading, batch, self._of_layers)
        positions = batch.position_ids[None] + 1
        found: torch.Tensor = self.head(batch.token_ids[None], features[None], positions, given, paged=paged)
        return found[0]


class AssistantNet(EagleNet):
    """Implements drafting.methods.net.DraftNet over an assistant."""

    _paged: PagedAssistant

    @torch.inference_mode()
    def draw_chains(self, drafts: Sequence[Draft]) -> None:
        """Finishes plain chains on the device, without copying tokens or logits to the host."""
        from outrider.engine.sampling.device_draws import draw_steps  # needs triton, installed on GPU machines

        served = self._begin(drafts)
        if not served:
            return
        rows = [self._rows(draft) for draft in served]
        outputs = torch.split(self._paged.forward(rows, self._inputs(served)), [len(part.token_ids) for part in rows])
        hidden = torch.cat([torch.stack(self._take(*pair)) for pair in zip(served, outputs, strict=True)])
        batch = self._paged.queries([self._draft_rows(draft, [0]) for draft in served])

        def step(token_ids: torch.Tensor | None, _depth: int) -> torch.Tensor:
            nonlocal hidden
            if token_ids is not None:
                features = self._paged.head.post_projection(hidden)
                hidden = self._paged.attend(dataclasses.replace(batch, token_ids=token_ids), features)
            return self._vocabulary.spread(self._paged.head.logits(hidden))

        chains = draw_steps([draft.chain_draws() for draft in served], step, self._paged.device)
        for draft, chain in zip(served, chains, strict=True):
            draft.take_chain(chain)

    def _rows(self, draft: Draft) -> SessionRows:
        if not draft.nodes:
            return super()._rows(draft)
        return self._draft_rows(draft, [draft.nodes[position].token_id for position in draft.frontier])

    def _draft_rows(self, draft: Draft, token_ids: list[int]) -> SessionRows:
        cache = self._rows_of.of(draft.session)
        return SessionRows(token_ids, cache.num_rows - 1, cache.table.block_ids, len(token_ids), num_chain_rows=0)

    def _computed(self, draft: Draft) -> list[int]:
        return draft.frontier


def _write_nothing(*_tensors: torch.Tensor) -> None:
    """Stands in for AttentionOps.kv_write."""
