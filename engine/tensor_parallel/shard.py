"""One rank's share of a model during loading: cut, connected, then checked against the whole model.

load_model calls the steps on every rank in the same order, and knows the ranks by Share alone. Not here: the steps
themselves (sharding, agreement).
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from outrider.engine.attention.ops import AttentionOps, LayerShape
from outrider.engine.model.dequantising import dequantising
from outrider.engine.tensor_parallel import agreement, sharding
from outrider.engine.tensor_parallel.collectives import Collectives

logger = logging.getLogger(__name__)
# names; most weights that a line of the log lists
_MAX_NAMES = 4


class Shard:
    """Implements engine.model.load.Share for one rank among those that `collectives` connects."""

    def __init__(self, path: str, model: Any, layer_shapes: list[LayerShape], collectives: Collectives) -> None:
        """Cuts a whole model in place; until `connect` a rank computes alone. Raises ModelRefused."""
        self._path = path
        self._model = model
        self._collectives = collectives
        self._whole_logits: torch.Tensor | None = None
        if collectives.rank == 0:  # all ranks compute the same together, and quantised weights are slow here
            with dequantising(model):
                self._whole_logits = agreement.sample_logits(model, layer_shapes)
        self._cut = sharding.cut_model(path, model, layer_shapes, collectives.rank, collectives.size)
        collectives.meet("weights read")

    def connect(self) -> None:
        """Makes every forward from now on involve all ranks."""
        sharding.connect(self._model, self._cut, self._collectives)

    def require_agreement(self, layer_shapes: list[LayerShape], ops: AttentionOps) -> None:
        """Raises ModelRefused, on rank 0, if the ranks do not compute the whole model. layer_shapes: this rank's."""
        together = agreement.sample_logits(self._model, layer_shapes, ops)
        if self._whole_logits is not None:
            agreement.require_agreement(self._path, self._whole_logits, together)
        if self._cut.uneven:
            uneven = sorted(self._cut.uneven)
            logger.warning(
                "%s: rank %d dequantises %d packed weights, whose groups it would have parts of: %s%s",
                *(self._path, self._collectives.rank, len(uneven), ", ".join(uneven[:_MAX_NAMES])),
                ", ..." if len(uneven) > _MAX_NAMES else "",
            )
