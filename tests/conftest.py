"""Where no GPU is, triton interprets its kernels on the CPU. It reads the variable when it is imported: so, first."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
