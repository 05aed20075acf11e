"""A step of transformers' own model under a CUDA graph, at a fixed context.

Its StaticCache counts on with every replay; here keys and values have fixed places, so that a replay is the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu_report.timing import Call


class FixedPlaces:
    """What attention asks of a cache: keys and values of a call go behind those of the context."""

    def __init__(self, num_layers: int) -> None:
        self.layers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self.context_len = 0
        self._num_spare = 0

    def begin_context(self, num_spare: int) -> None:
        """The next call of every layer is the context, with room for num_spare rows after it."""
        self._num_spare = num_spare

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key and value [1, Hkv, n, D]; returns those of all positions."""
        layer = self.layers[layer_idx]
        if layer is None:
            keys, values = (torch.nn.functional.pad(part, (0, 0, 0, self._num_spare)) for part in (key, value))
            self.layers[layer_idx] = keys, values
            return key, value
        end = self.context_len + key.shape[2]
        for stored, new in zip(layer, (key, value), strict=True):
            stored[:, :, self.context_len : end] = new
        return layer[0][:, :, :end], layer[1][:, :, :end]

    def get_seq_length(self, _layer_idx: int = 0) -> int:
        return self.context_len


@torch.inference_mode()
def stock_step(model: Any, context: Sequence[int], step: Sequence[int], device: torch.device) -> Call:
    """A function that runs the step's rows after the context and returns their argmax tokens on the host."""
    cache = FixedPlaces(model.config.num_hidden_layers)
    cache.begin_context(len(step))
    length = len(context) + len(step)
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
    positions = torch.arange(length, device=device)[None]
    token_ids = torch.tensor([[*context, *step]], device=device)

    def forward(rows: slice) -> torch.Tensor:
        output = model(
            token_ids[:, rows],
            position_ids=positions[:, rows],
            attention_mask=mask[:, :, rows, : rows.stop],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=rows.stop - rows.start,
        )
        tokens: torch.Tensor = output.logits[0].argmax(-1)
        return tokens

    forward(slice(0, len(context)))
    cache.context_len = len(context)
    rows = slice(len(context), length)
    replay = _captured(lambda: forward(rows)) if device.type == "cuda" else lambda: forward(rows)
    # Each call in a mode of its own: this function's ends when it returns.
    return torch.inference_mode()(lambda: replay().cpu())


def _captured(call: Any) -> Any:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return tokens  # type: ignore[no-any-return]

    return replay
