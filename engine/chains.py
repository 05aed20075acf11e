"""Chains of draft tokens that are drawn where the logits are: what is asked for, what comes back, and what a step of
them runs.

Not here: the drawing (device_draws, device_laws) and the loop (device_chains). Those need the triton kernels; this is
imported on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import ForwardBatch
from engine.runner import ModelRunner
from shared.messages import SparseLaw
from shared.sampling_params import SamplingParams


@dataclass(frozen=True)
class ChainDraws:
    """How the tokens of one session's chain are drawn.

    key_words: uint32 [tokens, 2], the noise of each token's race (engine.coupling.index_key); argmaxes read none.
    law_places: int64 [tokens], each from [0, LAW_TOTAL): where in its law each token stands; None: tokens race.
    """

    params: SamplingParams
    key_words: NDArray[np.uint32]
    law_places: NDArray[np.int64] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.key_words)


@dataclass(frozen=True)
class ChainStart:
    """One session's chain: its first token will stand at cache index `position`, and all but the last are computed.

    block_ids cover `position + tokens - 1` cache indices.
    """

    position: int
    block_ids: Sequence[int]
    draws: ChainDraws


@dataclass(frozen=True)
class DrawnToken:
    """share: how sure the drafter is, as in kernels/coupled_sample, or what the token's law gives it. law: the one that
    it was drawn from; None for the winner of a race."""

    token_id: int
    share: float
    law: SparseLaw | None = None


class ChainForward(Protocol):
    """A forward of one row per session that may be launched over and over, and captured in a CUDA graph.

    Contract: it launches work and waits for none, with shapes that depend on the batch's shapes alone; a row's results
    depend on its session alone; it writes keys and values where `slot_mapping` says, none at NO_SLOT. What a step hands
    to the next beside its tokens is `carried` [R, carried_width] of carried_dtype (width 0: nothing).
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
        """A batch on the device, one row per session -> logits [R, V] over the ids that sessions speak (-inf: never),
        and what the next step is to be given."""
        ...


class ModelForward:
    """ChainForward of a language model, which carries everything in its cache."""

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
