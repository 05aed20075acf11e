"""Copies of small host arrays to a device that do not wait for what the device is doing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def upload(values: NDArray[np.generic], device: torch.device | str) -> torch.Tensor:
    """Returns a tensor on the device with the array's numbers.

    From pinned memory: a copy from other host memory waits until the stream has done all that is queued, so that
    nothing is launched behind a forward before it ends (0.8 ms of a round of 6.0 on an H200).
    """
    tensor: Any = torch.from_numpy(values)
    if torch.device(device).type != "cuda":
        return tensor.to(device)  # type: ignore[no-any-return]
    return tensor.pin_memory().to(device, non_blocking=True)  # type: ignore[no-any-return]
