"""Where the tests of the triton kernels run: on the GPU if there is one, else interpreted on the CPU."""

from __future__ import annotations

import torch


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
