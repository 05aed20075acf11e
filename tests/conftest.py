"""Where no GPU is, triton interprets its kernels on the CPU. It reads the variable when it is imported: so, first.

And hypothesis is not to judge how fast a machine is, which may be busy otherwise.
"""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("unhurried", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
