"""Forwards of up to 128 rows as CUDA graphs: one launch instead of ten per layer.

A graph is captured at the first batch of its bucket (row_buckets), which takes as long as a few forwards. All graphs
share one memory pool: use or copy a result before the next forward.
Not here: when graphs are used at all (runner).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from outrider.engine.attention.batch import ForwardBatch
from outrider.engine.run.row_buckets import Bucket, bucket_of, empty_batch, fill

# forwards before a capture, on a side stream; they compile kernels and allocate libraries' workspaces
_WARM_UPS = 2

# Runs a forward on device tensors, with its further input if it has one; returns logits [R, V] and the tapped hidden
# states [T, H] per layer.
DeviceForward = Callable[[ForwardBatch, torch.Tensor | None], tuple[torch.Tensor, dict[int, torch.Tensor]]]


@dataclass(frozen=True)
class _Captured:
    graph: Any  # torch.cuda.CUDAGraph
    host: ForwardBatch  # pinned
    device: ForwardBatch
    carried: torch.Tensor | None  # on the device
    logits: torch.Tensor
    hidden: dict[int, torch.Tensor]


class GraphedForwards:
    """Captures and replays forwards of host batches: `run` returns what `forward` would, or None if no bucket fits."""

    def __init__(
        self, forward: DeviceForward, device: torch.device, *, carried_like: torch.Tensor | None = None
    ) -> None:
        """Takes the forward. carried_like: one row of its further input; None: it has none."""
        self._forward = forward
        self._device = device
        self._carried_like = carried_like
        self._pool: Any = None
        self._captured: dict[tuple[Bucket, tuple[int, ...]], _Captured] = {}

    def run(
        self,
        batch: ForwardBatch,
        carried: torch.Tensor | None = None,
        tap_layers: tuple[int, ...] = (),
        on_start: Callable[[], None] | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]] | None:
        """Replays the batch's forward, after capturing it if need be.

        carried: the further input, on the device. tap_layers: the layers that the forward taps now, part of the
        capture's key. on_start: called after the graph was launched.
        """
        bucket = bucket_of(batch)
        if bucket is None:
            return None
        key = (bucket, tap_layers)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(bucket)
        else:
            # The last replay's copies may still be reading the pinned buffers.
            torch.cuda.current_stream(self._device).synchronize()
        fill(captured.host, batch)
        _copy(captured.host, captured.device)
        if captured.carried is not None and carried is not None:
            captured.carried[: carried.shape[0]].copy_(carried)
        captured.graph.replay()
        if on_start is not None:
            on_start()
        num_rows = batch.token_ids.shape[0]
        return captured.logits[:num_rows], {layer: rows[:num_rows] for layer, rows in captured.hidden.items()}

    def _capture(self, bucket: Bucket) -> _Captured:
        host = empty_batch(bucket).mapped(torch.Tensor.pin_memory)
        device = empty_batch(bucket, self._device)
        like = self._carried_like
        carried = None if like is None else like.new_zeros(bucket.num_rows, len(like))
        results: list[tuple[torch.Tensor, dict[int, torch.Tensor]]] = []

        def forward() -> None:
            results[:] = [self._forward(device, carried)]

        graph = captured_graph(forward, self._device, self._pool)
        self._pool = graph.pool()
        return _Captured(graph, host, device, carried, *results[0])


def captured_graph(compute: Callable[[], None], device: torch.device, pool: Any = None) -> Any:
    """Returns a torch.cuda.CUDAGraph of what `compute` launches, after some warm-up runs; pool: of another graph."""
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            compute()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with _no_garbage_collection(), torch.cuda.graph(graph, pool=pool, stream=stream):
        compute()
    return graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keeps the cyclic collector out of a capture, which fails if a graph is destroyed in it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _copy(source: ForwardBatch, target: ForwardBatch) -> None:
    for ours, theirs in zip(target.tensors(), source.tensors(), strict=True):
        ours.copy_(theirs, non_blocking=True)
    if source.recurrent is not None and target.recurrent is not None:
        for ours, theirs in zip(target.recurrent.tensors(), source.recurrent.tensors(), strict=True):
            ours.copy_(theirs, non_blocking=True)


def to_device(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """Returns the batch in the device's memory; the batch itself if it is there."""
    if batch.token_ids.device.type == device.type:
        return batch
    return batch.mapped(lambda tensor: tensor.to(device, non_blocking=True))
