"""The attention kernels of one backend, and a layer's shape.

Not here: the cache (paged_kv), and how a model calls the kernels (layer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.engine.errors import BackendUnavailable
from outrider.kernels.index_scores.reference import IndexScores
from outrider.kernels.paged_attention.arguments import PagedAttention

ATTENTION_BACKENDS = ("auto", "cpu", "reference", "triton")


@dataclass(frozen=True)
class LayerShape:
    """One attention layer's shape, as seen in the probe forward."""

    module_name: str
    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None
    chunk_size: int | None = None
    values_in_keys: bool = False  # a value is the first value_dim elements of its key: one tensor holds both
    index_dim: int = 0  # elements of its indexer's key, cached beside it; 0: it has no indexer


@dataclass(frozen=True)
class AttentionOps:
    """The kernels of one backend. index_scores: None if it has none."""

    backend: str
    paged_attention: PagedAttention
    kv_write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    kv_move: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    index_scores: IndexScores | None = None
    takes_plans: bool = False  # paged_attention has the keyword `plans` (see kernels/paged_attention/cpu)

    @property
    def row_backend(self) -> str:
        """Names the backend of the model's linears, norms, gates and rotations: "triton" or "cpu" (row_kernels)."""
        return "triton" if self.backend == "triton" else "cpu"


def resolve_attention_ops(backend: str, device: torch.device) -> AttentionOps:
    """Returns the kernels of a backend in ATTENTION_BACKENDS.

    "auto" chooses the fastest on the device. Raises BackendUnavailable.
    """
    if backend not in ATTENTION_BACKENDS:
        raise BackendUnavailable(f"attention_backend={backend!r}: choose one of {', '.join(ATTENTION_BACKENDS)}")
    if backend == "auto":
        backend = "cpu" if device.type == "cpu" else "triton"
    if backend == "cpu" and device.type != "cpu":
        raise BackendUnavailable(f"attention_backend='cpu' on {device.type}: use 'triton' or 'auto'")
    # Imported here: numba and triton import slowly, and not every backend needs them.
    if backend == "triton":
        return _triton_ops(device)
    if backend == "reference":
        from outrider.kernels.index_scores.reference import index_scores as score_in_torch
        from outrider.kernels.kv_write import reference as write_kernels
        from outrider.kernels.paged_attention import reference as attention_kernels

        return AttentionOps(
            "reference",
            attention_kernels.paged_attention,
            write_kernels.kv_write,
            write_kernels.kv_move,
            score_in_torch,
        )
    from outrider.kernels.index_scores.cpu import index_scores
    from outrider.kernels.kv_write.cpu import kv_move, kv_write
    from outrider.kernels.paged_attention.cpu import paged_attention

    return AttentionOps(
        "cpu",
        paged_attention,
        kv_write,
        kv_move,
        index_scores,
        takes_plans=True,
    )


def _triton_ops(device: torch.device) -> AttentionOps:
    try:
        from triton import knobs
    except ImportError as error:
        fix = "install the extra 'gpu', or use device='cpu' with attention_backend='cpu'"
        raise BackendUnavailable(f"attention_backend='triton': {error}; {fix}") from error
    if device.type == "cpu" and not knobs.runtime.interpret:
        raise BackendUnavailable(
            "attention_backend='triton' on cpu: use 'cpu' (TRITON_INTERPRET=1 runs the triton kernels there, for tests)"
        )
    from outrider.kernels.kv_write.triton import kv_move, kv_write
    from outrider.kernels.paged_attention.triton import paged_attention

    return AttentionOps("triton", paged_attention, kv_write, kv_move)
