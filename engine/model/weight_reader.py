"""Reads a weight of a checkpoint: as floats, and as codes where the file has codes.

Not here: the files (weight_files, gguf/file), what they mean (quantised, gguf), weights that wait to be packed
(coded_weights).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.kernels.linear.codes import Codes


@dataclass(frozen=True)
class WeightReader:
    """Reads one weight.

    Calling it returns the weight, dequantised. codes: None where the file has none. expert_codes: those of one expert,
    by its number, where the weight holds all experts of a layer. All raise ModelRefused.
    """

    read: Callable[[], torch.Tensor]
    codes: Callable[[], Codes] | None = None
    expert_codes: Callable[[int], Codes] | None = None

    def __call__(self) -> torch.Tensor:
        return self.read()
