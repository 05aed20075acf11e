"""Types of draft chains drawn on the device: request, result, and the forward of a step.

Imported on every machine. Not here: drawing (device_draws, device_laws) and the loop (device_chains), which need the
triton kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.attention.batch import ForwardBatch
from outrider.engine.run.runner import ModelRunner
from outrider.shared.messages import SparseLaw
from outrider.shared.sampling_params import SamplingParams


@dataclass(frozen=True)
class ChainDraws:
    """The parameters and randomness with which the tokens of one session's chain are drawn."""

    params: SamplingParams
    key_words: NDArray[np.uint32]  # [tokens, 2], from engine.sampling.coupling.index_key; not read by argmax
    # [tokens], uniform in [0, LAW_TOTAL): the quantile of each token in its law; None: tokens are drawn by a race.
    law_places: NDArray[np.int64] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.key_words)


@dataclass(frozen=True)
class ChainStart:
    """One session's chain: its first token has cache index `position`; all tokens but the last are computed.

    block_ids must cover `position + tokens - 1` cache indices.
    """

    position: int
    block_ids: Sequence[int]
    draws: ChainDraws


@dataclass(frozen=True)
class DrawnToken:
    """A token of a chain, with what its acceptance needs."""

    token_id: int
    share: float  # the drafter's confidence, as in kernels/coupled_sample, or the token's probability in its law
    law: SparseLaw | None = None  # None: the winner of a race


class ChainForward(Protocol):
    """A forward of one row per session that can be captured in a CUDA graph.

    Contract: it launches work without waiting, its shapes depend on the batch's shapes alone, a row's results on its
    session alone; it writes keys and values to `slot_mapping`, except at NO_SLOT. `carried` [R, carried_width], of
    carried_dtype, passes from step to step besides the tokens (width 0: nothing).
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def block_size(self) -> int: ...

    @property
    def uses_graphs(self) -> bool: ...

    @property
    def carried_width(self) -> int: ...

    @property
    def carried_dtype(self) -> torch.dtype: ...

    def forward(self, batch: ForwardBatch, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs a batch on the device, one row per session; returns logits [R, V] over the sessions' token ids (-inf:
        never), and the next step's `carried`."""
        ...


class ModelForward:
    """The ChainForward of a language model; its state is in the cache, `carried` is empty."""

    carried_width = 0

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.device = runner.loaded.device
        self.block_size = runner.cache.block_size
        self.carried_dtype = runner.loaded.dtype

    @property
    def uses_graphs(self) -> bool:
        return self._runner.uses_graphs

    def forward(self, batch: ForwardBatch, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._runner.forward(batch).logits, carried
