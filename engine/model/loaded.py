"""A model that is ready to run: its weights, its kernels and its dimensions.

Not here: loading (load), running (run/runner), several processes (tensor_parallel).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from outrider.engine.attention.batch import ForwardBatch
from outrider.engine.attention.ops import AttentionOps, LayerShape
from outrider.engine.attention.paged_kv import CODE_NAMES, DEFAULT_BLOCK_SIZE, PagedKVCache, bytes_per_block
from outrider.engine.errors import ModelRefused
from outrider.engine.model.lean.make_lean import LeanReport
from outrider.engine.model.row_invariance import RowInvarianceReport
from outrider.engine.recurrent.states import NUM_LOG_ROWS, RecurrentShape, RecurrentStates


class OtherRanks(Protocol):
    """Rank 0's handle on the other ranks of a tensor-parallel model (tensor_parallel/leader).

    Contract: `make_cache` takes PagedKVCache's arguments and makes a cache on every rank. `in_step` is entered around
    each forward on such a cache: the other ranks run the same one. After `close` neither may be called.
    """

    def make_cache(
        self,
        layer_shapes: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: AttentionOps,
    ) -> PagedKVCache: ...

    def in_step(self, cache: PagedKVCache, batch: ForwardBatch) -> AbstractContextManager[None]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run."""

    path: str
    architecture: str  # class name, e.g. "LlamaForCausalLM"
    model: Any  # transformers PreTrainedModel
    config: Any  # transformers PretrainedConfig of the text model
    dtype: torch.dtype
    device: torch.device
    attention_ops: AttentionOps
    layer_shapes: tuple[LayerShape, ...]  # of the layers with attention, in order
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    row_invariance: RowInvarianceReport | None  # None: loaded with row_invariant=False
    lean: LeanReport | None = None  # None: loaded with row_invariant=False or lean=False
    leader: OtherRanks | None = None  # on rank 0 of a tensor-parallel model
    recurrent_shapes: tuple[RecurrentShape, ...] = ()  # of the recurrent layers, in order
    kv_code_dtype: torch.dtype | None = None  # of an 8-bit KV cache; None: it has the model's dtype

    @property
    def kv_cache_name(self) -> str:
        """Returns the type of the KV cache's contents: "bfloat16", "float32", "fp8" or "int8"."""
        return str(self.dtype).removeprefix("torch.") if self.kv_code_dtype is None else CODE_NAMES[self.kv_code_dtype]

    def make_cache(self, num_blocks: int, block_size: int = DEFAULT_BLOCK_SIZE) -> PagedKVCache:
        """Makes a zeroed cache of num_blocks blocks for all layers."""
        make = PagedKVCache if self.leader is None else self.leader.make_cache
        return make(
            self.layer_shapes,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self.kv_code_dtype or self.dtype,
            device=self.device,
            ops=self.attention_ops,
        )

    def make_states(self, num_slots: int, num_log_rows: int = NUM_LOG_ROWS) -> RecurrentStates | None:
        """Makes zeroed slots for all recurrent layers; None for a model without recurrent layers."""
        if not self.recurrent_shapes:
            return None
        return RecurrentStates(
            self.recurrent_shapes, num_slots=num_slots, num_log_rows=num_log_rows, dtype=self.dtype, device=self.device
        )

    def bytes_per_slot(self, num_log_rows: int = NUM_LOG_ROWS) -> int:
        """Returns the bytes of one slot over all recurrent layers; 0 for a model without recurrent layers."""
        return sum(shape.bytes_per_slot(self.dtype, num_log_rows) for shape in self.recurrent_shapes)

    def in_step(self, cache: PagedKVCache, batch: ForwardBatch) -> AbstractContextManager[None]:
        """Returns the context of each forward: within it the other ranks of a tensor-parallel model run it too."""
        return nullcontext() if self.leader is None else self.leader.in_step(cache, batch)

    def close(self) -> None:
        """Ends the other ranks of a tensor-parallel model."""
        if self.leader is not None:
            self.leader.close()

    def bytes_per_block(self, block_size: int = DEFAULT_BLOCK_SIZE) -> int:
        """Returns the bytes of one block over all layers, of this rank's share."""
        return bytes_per_block(self.layer_shapes, block_size, self.kv_code_dtype or self.dtype)

    def decoder_layer(self, layer: int) -> torch.nn.Module:
        """Returns the module whose output is the residual stream after `layer`."""
        return self._layer_list()[1][layer]

    def body(self) -> torch.nn.Module:
        """Returns the module that holds the decoder layers; its output, after the final norm, is the head's input."""
        return self._layer_list()[0]

    def _layer_list(self) -> tuple[torch.nn.Module, torch.nn.ModuleList]:
        """Returns the module that holds the decoder layers, and their list, around all attention and mixers."""
        name = (self.layer_shapes or self.recurrent_shapes)[0].module_name
        parts = name.split(".")
        for length in range(1, len(parts)):
            holder = self.model.get_submodule(".".join(parts[: length - 1]))
            layers = getattr(holder, parts[length - 1])
            if isinstance(layers, torch.nn.ModuleList) and len(layers) == self.num_layers:
                return holder, layers
        raise ModelRefused(self.path, f"no list of decoder layers above {name}")
