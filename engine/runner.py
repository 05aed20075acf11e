"""One forward of a loaded model over a ragged batch: rows in, logits (and tapped hidden states) out.

Not here: who is in the batch (scheduler), sampling and acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention import PagedContext
from engine.batch import ForwardBatch
from engine.cpu_graphs import RecordedForwards, is_recordable
from engine.cuda_graphs import GraphedForwards, to_device
from engine.model import LoadedModel
from engine.paged_kv import PagedKVCache


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class ForwardResult:
    """logits [R, V] for batch.logits_rows, float32 on the CPU; hidden[L] [T, H] in the model's dtype.

    On a CUDA device both are on it, logits in the model's dtype, and the next forward may overwrite them.
    """

    logits: torch.Tensor
    hidden: dict[int, torch.Tensor]


class ModelRunner:
    """Runs forwards of one model on one cache. Not for use from two threads at a time."""

    def __init__(self, loaded: LoadedModel, cache: PagedKVCache, *, graphs: bool = False) -> None:
        """graphs: small batches run as CUDA graphs, or recorded on the CPU; no effect with several ranks."""
        self.loaded = loaded
        self.cache = cache
        self._graphs: GraphedForwards | RecordedForwards | None = None
        if graphs and loaded.device.type == "cuda" and loaded.leader is None:
            self._graphs = GraphedForwards(self._compute, loaded.device)
        elif graphs and is_recordable(loaded):
            table_width = min(cache.num_blocks, -(-loaded.max_model_len // cache.block_size))
            self._graphs = RecordedForwards(
                lambda batch, _carried: self._compute(batch),
                loaded.model,
                loaded.layer_shapes,
                vocab_size=loaded.vocab_size,
                table_width=table_width,
            )
        self._wanted: frozenset[int] = frozenset()
        self._tapped: dict[int, torch.Tensor] = {}
        self._hooked: dict[int, Any] = {}

    @property
    def uses_graphs(self) -> bool:
        return self._graphs is not None

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, tap_layers: Sequence[int] = (), on_start: Callable[[], None] = _nothing
    ) -> ForwardResult:
        """Write the batch's keys and values into the cache and return logits of batch.logits_rows.

        The batch may be in host memory whatever the model's device; for CUDA graphs it has to be.
        tap_layers: hidden states wanted, numbered as transformers numbers them: 0 is the embedding, L the
        output of layer L-1, and num_layers the output of the final norm (what the head reads).
        on_start is called when all is prepared: from there on a recorded forward leaves the interpreter to others.
        Hooks on the layers, not output_hidden_states: that one keeps every layer's.
        """
        self._wanted = frozenset(tap_layers)
        for layer in self._wanted - self._hooked.keys():
            self._install_tap(layer)
        if self._graphs is not None and batch.token_ids.device.type == "cpu":
            replayed = self._graphs.run(batch, tap_layers=tuple(sorted(self._wanted)), on_start=on_start)
            if replayed is not None:
                return ForwardResult(*replayed)
        on_start()
        with self.loaded.in_step(self.cache, batch):
            return ForwardResult(*self._compute(to_device(batch, self.loaded.device)))

    def _compute(self, batch: ForwardBatch) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        self._tapped = {}  # another runner of this model may have left something
        output = self.loaded.model(
            batch.token_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            logits_to_keep=batch.logits_rows,
            paged=PagedContext(self.loaded.attention_ops, batch, self.cache),
        )
        hidden, self._tapped = self._tapped, {}
        logits: torch.Tensor = output.logits[0]
        # The sampling kernels read the model's own dtype: half the bytes of 128k logits a row.
        return logits if logits.device.type == "cuda" else logits.float(), hidden

    def close(self) -> None:
        """Take the taps off the model again."""
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()

    def _install_tap(self, layer: int) -> None:
        num_layers = self.loaded.num_layers
        if not 0 <= layer <= num_layers:
            raise ValueError(f"tap layer {layer}: the model has hidden states 0 to {num_layers}")
        if layer == num_layers:
            self._hooked[layer] = self.loaded.body().register_forward_hook(
                lambda _module, _args, output: self._keep(layer, output[0])
            )
        elif layer == 0:
            self._hooked[layer] = self.loaded.decoder_layer(0).register_forward_pre_hook(
                lambda _module, args, kwargs: self._keep(0, args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
        else:
            self._hooked[layer] = self.loaded.decoder_layer(layer - 1).register_forward_hook(
                lambda _module, _args, output: self._keep(
                    layer, output if isinstance(output, torch.Tensor) else output[0]
                )
            )

    def _keep(self, layer: int, hidden_states: torch.Tensor) -> None:
        if layer in self._wanted:
            self._tapped[layer] = hidden_states[0]
