"""Fits the batch size, unless the user sets it: the memory that a window takes, against the free memory.

A step trains on the same number of windows whatever the memory: smaller batches are accumulated. Not here: arrays of
[positions, vocabulary], which do not grow with the batch (heads/sliced_loss.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from accelerate import Accelerator

from outrider.shared.machine.memory import available_memory_bytes
from outrider.training.data.head_data import TokenWindows, make_batch
from outrider.training.head_trainer import noise_generator
from outrider.training.heads.interface import SLICE_BYTES, Batch, Objective, TargetView
from outrider.training.run_config import OptimizationConfig

# factor; memory of a window over what autograd keeps of it; chosen, as a backward pass makes gradients and temporaries
# of the same sizes
_BACKWARD_FACTOR = 2
# share of the free memory; most that a step may fill; chosen, to leave the rest to other programs and fragmentation
_SHARE = 0.8
# bytes; added per trained float32 weight in a step: gradient, its sum over slices, AdamW's two moments
_BYTES_PER_WEIGHT = 16
_GIB = 2**30


class _Kept:
    """A tensor that autograd keeps for the backward pass; lives as long as its graph."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def window_bytes(
    objective: Objective, view: Callable[[Batch], TargetView], windows: TokenWindows, accelerator: Accelerator
) -> int:
    """Returns the bytes that one more window of the greatest length adds to a step.

    Measured by forward passes of one and two windows.
    """
    longest = int((windows.ends - windows.starts).argmax())

    def kept_bytes(num_windows: int) -> int:
        batch = make_batch(windows, np.full(num_windows, longest)).part(slice(None), accelerator.device)
        kept: weakref.WeakSet[_Kept] = weakref.WeakSet()

        def pack(tensor: torch.Tensor) -> _Kept:
            holder = _Kept(tensor)
            kept.add(holder)
            return holder

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor), accelerator.autocast():
            seen = view(batch)
            outcome = objective.train()(batch, seen, noise_generator(0, 0, 0))
        storages = [holder.tensor.untyped_storage() for holder in kept]
        storages += [tensor.untyped_storage() for tensor in (seen.features, seen.final)]
        del outcome  # until here it holds the graph
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    return _BACKWARD_FACTOR * (kept_bytes(2) - kept_bytes(1))


def free_bytes(accelerator: Accelerator) -> int | None:
    """Returns this process's share of its device's free memory, the least over all processes; None if unknown."""
    if accelerator.device.type == "cuda":
        free: int | None = torch.cuda.mem_get_info(accelerator.device)[0]
    else:
        available = available_memory_bytes()
        free = None if available is None else available // accelerator.num_processes
    if free is None or accelerator.num_processes == 1:
        return free
    return int(accelerator.gather(torch.tensor([free], device=accelerator.device)).min())


def fitted(
    config: OptimizationConfig, objective: Objective, bytes_per_window: int, free: int, num_processes: int
) -> tuple[OptimizationConfig, str]:
    """Fits the batch into `free` bytes; returns (the new config, a line about it).

    The batch is halved, and accumulation doubled, until a step fits. It does not get smaller than one window per
    process.
    """
    num_weights = sum(parameter.numel() for parameter in objective.parameters() if parameter.requires_grad)
    room = int(_SHARE * free) - SLICE_BYTES - _BYTES_PER_WEIGHT * num_weights
    batch_size, accumulation = config.batch_size, config.accumulation
    while batch_size % (2 * num_processes) == 0 and batch_size // num_processes * bytes_per_window > room:
        batch_size, accumulation = batch_size // 2, accumulation * 2
    line = (
        f"batches of {batch_size} windows, {accumulation} a step: a window takes {bytes_per_window / _GIB:.2f} GiB, "
        f"{max(0, room) / _GIB:.1f} GiB of {free / _GIB:.1f} GiB free are left for windows"
    )
    return replace(config, batch_size=batch_size, accumulation=accumulation), line
