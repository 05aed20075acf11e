"""A head's module with its own paged cache; an EAGLE head or MTP layer: rows in, next features out."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from outrider.engine.attention.batch import ForwardBatch, SessionRows, build_batch
from outrider.engine.attention.block_manager import BlockManager
from outrider.engine.attention.layer import ATTENTION_NAME, AttentionProbe, PagedContext, register_attention
from outrider.engine.attention.ops import AttentionOps, LayerShape
from outrider.engine.attention.paged_kv import PagedKVCache, bytes_per_block
from outrider.engine.model.guards import number_attention_layers
from outrider.engine.model.latent_attention import keep_latents
from outrider.engine.model.lean.make_lean import make_lean
from outrider.engine.model.lean.module_calls import Probe
from outrider.engine.model.quantised.pack_linears import pack_linears
from outrider.engine.model.row_invariance import make_row_invariant
from outrider.engine.model.sparse_indexer import adapt_indexers
from outrider.engine.run.cpu_graphs import RecordedForwards
from outrider.engine.run.cuda_graphs import GraphedForwards, to_device


class FeatureHead(Protocol):
    """The interface of EagleHead, Eagle3Head and MtpHead; shapes as in drafting.heads."""

    @property
    def config(self) -> Any:
        """Returns a config whose `decoder` has hidden_size, vocab_size and max_position_embeddings."""
        ...

    @property
    def feature_layers(self) -> tuple[int, ...]: ...

    def fuse(self, hidden_states: torch.Tensor) -> torch.Tensor: ...

    def __call__(
        self, token_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, *, paged: PagedContext
    ) -> torch.Tensor: ...

    def logits(self, features: torch.Tensor) -> torch.Tensor: ...


class PagedModule:
    """A head's module over a paged cache: its layers' keys and values, and leaner modules in place of its own."""

    def __init__(
        self,
        head: Any,
        ops: AttentionOps,
        dtype: torch.dtype,
        *,
        kv_cache_bytes: int,
        block_size: int,
        device: torch.device | str = "cpu",
        graphs: bool = False,
    ) -> None:
        """Moves the head to the device and replaces its modules by leaner ones.

        The head must have been built with attn_implementation=ATTENTION_NAME. graphs: small batches run as
        recorded forwards on the CPU, and as CUDA graphs on a GPU.
        """
        register_attention()
        self.head = head
        self.dtype = dtype
        self.device = torch.device(device)
        self._ops = ops
        decoder = head.config.decoder
        head.to(self.device).requires_grad_(False)
        pack_linears(head, ops, dtype, self.device)
        adapt_indexers(type(head).__name__, head, ops)
        keep_latents(head, ops, max_positions=decoder.max_position_embeddings, probe=self._probe)
        shapes = _layer_shapes(head, ops, self._probe)
        number_attention_layers(head, shapes)
        num_blocks = max(1, kv_cache_bytes // bytes_per_block(shapes, block_size, dtype))
        self._cache = PagedKVCache(
            shapes, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=self.device, ops=ops
        )
        self.blocks = BlockManager(num_blocks, block_size)
        lean = make_lean(head, shapes, ops, max_positions=decoder.max_position_embeddings, probe=self._probe)
        has_experts = make_row_invariant(head, ops.row_backend).num_routers > 0
        self.table_width = min(num_blocks, -(-decoder.max_position_embeddings // block_size))
        self.layer_shapes = shapes
        self.is_recordable = (
            graphs and lean.is_whole and not has_experts and self.device.type == "cpu" and ops.backend == "cpu"
        )

    @property
    def hidden_size(self) -> int:
        return int(self.head.config.decoder.hidden_size)

    def context(self, batch: ForwardBatch) -> PagedContext:
        """Returns the attention layers' argument for a batch on the device."""
        return PagedContext(self._ops, batch, self._cache)

    def _probe(self, token_ids: torch.Tensor, position_ids: torch.Tensor, paged: PagedContext) -> object:
        """Runs the head over token_ids, position_ids int64 [1, T] of one session, with features of zeros."""
        raise NotImplementedError


class PagedHead(PagedModule):
    """An EAGLE head or MTP layer over a paged cache.

    Row i of a session pairs the feature of position i with token i + 1. Not thread-safe.
    """

    head: FeatureHead

    def __init__(
        self, head: FeatureHead, ops: AttentionOps, dtype: torch.dtype, *, graphs: bool = False, **memory: Any
    ) -> None:
        """See PagedModule."""
        self._no_features = torch.zeros(head.config.decoder.hidden_size, dtype=dtype, device=memory.get("device"))
        super().__init__(head, ops, dtype, graphs=graphs, **memory)
        self._recorded: RecordedForwards | GraphedForwards | None = None
        if graphs and self.device.type == "cuda":
            self._recorded = GraphedForwards(self._net_forward, self.device, carried_like=self._no_features)
        elif self.is_recordable:
            module: Any = head
            self._recorded = RecordedForwards(
                self._net_forward,
                module,
                self.layer_shapes,
                vocab_size=module.config.decoder.vocab_size,
                table_width=self.table_width,
                carried_like=self._no_features,
            )

    @torch.inference_mode()
    def forward(self, rows: Sequence[SessionRows], features: torch.Tensor) -> torch.Tensor:
        """Maps features [T, H] of all rows in order -> next features [T, H]; writes keys and values."""
        batch = build_batch(rows, self.blocks.block_size)
        if self._recorded is not None:
            # Every row is requested, whichever logits are wanted: a recorded forward returns a row's features here.
            every_row = torch.arange(len(features))
            found = self._recorded.run(dataclasses.replace(batch, logits_rows=every_row), features)
            if found is not None:
                return _copied(found[0])
        return self.compute(to_device(batch, self.device), features)

    @torch.inference_mode()
    def compute(self, batch: ForwardBatch, features: torch.Tensor) -> torch.Tensor:
        """Runs `forward` for a batch already on the device."""
        paged = self.context(batch)
        return self.head(batch.token_ids[None], features[None], batch.position_ids[None], paged=paged)[0]

    def _probe(self, token_ids: torch.Tensor, position_ids: torch.Tensor, paged: PagedContext) -> object:
        return self.head(token_ids, self._no_features.expand(*token_ids.shape, -1), position_ids, paged=paged)

    def _net_forward(
        self, batch: ForwardBatch, features: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        if features is None:
            raise ValueError("a head needs features")
        return self.compute(batch, features), {}


@torch.inference_mode()
def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copies by this thread alone on the CPU, where torch's clone wakes all threads (16 rows of logits, busy: 3 ms)."""
    if tensor.device.type != "cpu":
        return tensor.clone()
    tensor = tensor.contiguous()
    copy = torch.empty_like(tensor)
    ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    return copy


def _layer_shapes(module: torch.nn.Module, ops: AttentionOps, run: Probe) -> list[LayerShape]:
    """Returns the layers' shapes, from a one-row forward whose attention function only records."""
    probe = AttentionProbe({id(part): name for name, part in module.named_modules()})
    row = torch.zeros((1, 1), dtype=torch.int64, device=next(module.parameters()).device)
    run(row, row, PagedContext(ops, probe=probe))
    return [probe.layers[index] for index in sorted(probe.layers)]


__all__ = ["ATTENTION_NAME", "FeatureHead", "PagedHead", "PagedModule"]
