"""One forward of a loaded model over a ragged batch: rows in, logits (and tapped hidden states) out.

Not here: who is in the batch (scheduler), sampling and acceptance.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.engine.attention.batch import ForwardBatch
from outrider.engine.attention.layer import PagedContext
from outrider.engine.attention.paged_kv import PagedKVCache
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.recurrent.states import RecurrentStates
from outrider.engine.run.cpu_graphs import RecordedForwards, is_recordable
from outrider.engine.run.cuda_graphs import GraphedForwards, to_device


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class ForwardResult:
    """The result of a forward.

    logits [R, V] for batch.logits_rows, float32 on the CPU; hidden[L] [T, H] in the model's dtype. The runner's next
    forward may overwrite the logits, and on a CUDA device hidden too. On a CUDA device both stay there, logits in the
    model's dtype.
    """

    logits: torch.Tensor
    hidden: dict[int, torch.Tensor]


class ModelRunner:
    """Runs forwards of one model on one cache. Not for use from two threads at a time."""

    def __init__(
        self, loaded: LoadedModel, cache: PagedKVCache, states: RecurrentStates | None = None, *, graphs: bool = False
    ) -> None:
        """Prepares forwards. states: only for a model with recurrent layers. graphs: runs small batches as CUDA graphs,
        or recorded on the CPU; no effect with several ranks."""
        self.loaded = loaded
        self.cache = cache
        self.states = states
        self._graphs: GraphedForwards | RecordedForwards | None = None
        if graphs and loaded.device.type == "cuda" and loaded.leader is None:
            self._graphs = GraphedForwards(lambda batch, _carried: self._compute(batch), loaded.device)
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

    @property
    def most_measured_sessions(self) -> int:
        """Returns the most sessions of a forward whose sessions have the states of recurrent.rows.measured_state."""
        return sys.maxsize if self.states is None else self.states.num_slots // 2

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, tap_layers: Sequence[int] = (), on_start: Callable[[], None] = _nothing
    ) -> ForwardResult:
        """Writes the batch's keys and values into the cache and returns the logits of batch.logits_rows.

        The batch may be in host memory on any device; CUDA graphs need it there.
        tap_layers: wanted hidden states, numbered as in transformers: 0 is the embedding, L the output of layer L-1,
        num_layers the output of the final norm (the head's input). Taken by hooks: output_hidden_states would keep
        every layer's. on_start: called when all is prepared; from then on a recorded forward does not hold the GIL.
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

    @torch.inference_mode()
    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        """Runs `forward` without graphs, recordings and hidden states, for callers that are part of a recording."""
        self._wanted = frozenset()
        return self._compute(batch)[0]

    def _compute(self, batch: ForwardBatch) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        self._tapped = {}  # another runner of this model may have filled it
        output = self.loaded.model(
            batch.token_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            logits_to_keep=batch.logits_rows,
            paged=PagedContext(self.loaded.attention_ops, batch, self.cache, states=self.states),
        )
        hidden, self._tapped = self._tapped, {}
        logits: torch.Tensor = output.logits[0]
        # The sampling kernels read the model's own dtype: half the bytes.
        return logits if logits.device.type == "cuda" else logits.float(), hidden

    def close(self) -> None:
        """Removes the taps from the model."""
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
