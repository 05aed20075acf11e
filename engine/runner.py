"""One forward of a loaded model over a ragged batch: rows in, logits (and tapped hidden states) out.

Not here: who is in the batch (scheduler), sampling and acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention import PagedContext
from engine.batch import ForwardBatch
from engine.model import LoadedModel
from engine.paged_kv import PagedKVCache


@dataclass(frozen=True)
class ForwardResult:
    """logits float32 [R, V] for batch.logits_rows; hidden[L] [T, H] in the model's dtype."""

    logits: torch.Tensor
    hidden: dict[int, torch.Tensor]


class ModelRunner:
    """Runs forwards of one model on one cache. Not for use from two threads at a time."""

    def __init__(self, loaded: LoadedModel, cache: PagedKVCache) -> None:
        self.loaded = loaded
        self.cache = cache
        self._wanted: frozenset[int] = frozenset()
        self._tapped: dict[int, torch.Tensor] = {}
        self._hooked: dict[int, Any] = {}

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, tap_layers: Sequence[int] = ()) -> ForwardResult:
        """Write the batch's keys and values into the cache and return logits of batch.logits_rows.

        tap_layers: hidden states wanted, numbered as transformers numbers them: 0 is the embedding, L the
        output of layer L-1, and num_layers the output of the final norm (what the head reads).
        Hooks on the layers, not output_hidden_states: that one keeps every layer's.
        """
        self._wanted = frozenset(tap_layers)
        for layer in self._wanted - self._hooked.keys():
            self._install_tap(layer)
        output = self.loaded.model(
            batch.token_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            logits_to_keep=batch.logits_rows,
            paged=PagedContext(self.loaded.attention_ops, batch, self.cache),
        )
        hidden, self._tapped = self._tapped, {}
        return ForwardResult(output.logits[0].float(), hidden)

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
