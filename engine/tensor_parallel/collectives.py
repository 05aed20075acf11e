"""Collectives of a tensor-parallel model's ranks inside a forward.

There is one primitive, an all-gather of bytes. Sums are taken on each rank, in fp32 and in the order of ranks: an
all-reduce chooses its order of additions by message size, so a row's bits would depend on the number of rows.
Not here: which modules exchange (sharding) and which forward comes next (protocol).
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

# limit of one exchange; a rank that takes longer has stopped
_EXCHANGE_TIMEOUT = timedelta(seconds=60)
# limit for importing torch and reading weights, whose times may differ by minutes between ranks
_BARRIER_TIMEOUT = timedelta(hours=1)


class Collectives:
    """This process's membership in the group of ranks. Joining blocks until all ranks have joined."""

    def __init__(self, store: Store, rank: int, size: int, device: str) -> None:
        """Joins the group. store: the ranks'; device "cpu" (gloo), "cuda" (NCCL, rank r on GPU r) or "auto"."""
        self.rank = rank
        self.size = size
        self._store = store
        _stay_on_this_machine()
        on_cuda = device != "cpu" and torch.cuda.is_available()
        if on_cuda:
            torch.cuda.set_device(rank)
        backend = "nccl" if on_cuda else "gloo"
        self.meet("started")
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_EXCHANGE_TIMEOUT)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns every rank's tensor, all of one shape and dtype, in the order of ranks."""
        # Sent as bytes: gloo supports few dtypes.
        sent = tensor.contiguous().view(torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent)
        return [part.view(tensor.dtype) for part in received]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum over ranks, added in fp32 in the order of ranks and rounded once to the tensor's dtype."""
        first, *others = self.gather(tensor)
        total = first.float()
        for part in others:
            total = total + part.float()
        return total.to(tensor.dtype)

    def meet(self, place: str) -> None:
        """Waits until every rank has called it with this name (a barrier); each name can be used once."""
        self._store.set(f"{place}/{self.rank}", "here")
        self._store.wait([f"{place}/{rank}" for rank in range(self.size)], _BARRIER_TIMEOUT)

    def leave(self) -> None:
        dist.destroy_process_group()

    def __deepcopy__(self, _memo: dict[int, Any]) -> Collectives:
        """Returns the group itself: a copied module stays in the same group."""
        return self


class SummedOutput(torch.nn.Module):
    """A linear, or experts, whose inner features are split over ranks: returns the sum of the ranks' outputs."""

    def __init__(self, inner: torch.nn.Module, collectives: Collectives) -> None:
        super().__init__()
        self.inner = inner
        self._collectives = collectives

    def forward(self, *args: Any) -> torch.Tensor:
        return self._collectives.sum(self.inner(*args))


class GatheredOutput(torch.nn.Module):
    """A linear whose outputs are split over ranks: returns all of them, concatenated in the order of ranks."""

    def __init__(self, inner: torch.nn.Module, collectives: Collectives) -> None:
        super().__init__()
        self.inner = inner
        self._collectives = collectives

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._collectives.gather(self.inner(x)), dim=-1)


def _stay_on_this_machine() -> None:
    """Restricts the ranks' sockets to loopback: they have no authentication."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
