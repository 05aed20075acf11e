"""A forward's outputs for one session: logits on the host, or what was drawn from them on the device.

Not here: drawing (device_sampling) and deciding (round).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.verifier_service.acceptance.outcome import Acceptance
from outrider.verifier_service.scheduler import Work

NO_LOGITS: NDArray[np.float32] = np.empty((0, 0), dtype=np.float32)


@dataclass(frozen=True)
class RowOutputs:
    """The outputs of one session's rows. Exactly one field is set, or none if no row was wanted.

    logits: float32 [N, V], of the session's N wanted rows in order. token_ids: int64 [N], the target's token after each
    row; the draft is accepted as far as it equals them. acceptance: a rule's result.
    """

    logits: NDArray[np.float32] = field(default_factory=lambda: NO_LOGITS)
    token_ids: NDArray[np.int64] | None = None
    acceptance: Acceptance | None = None

    def last(self, count: int) -> RowOutputs:
        """The last `count` rows."""
        if self.acceptance is not None:
            return self
        if self.token_ids is not None:
            return RowOutputs(token_ids=self.token_ids[len(self.token_ids) - count :])
        return RowOutputs(self.logits[len(self.logits) - count :])


def host_outputs(plan: Sequence[Work], logits: torch.Tensor) -> list[RowOutputs]:
    """RowOutputs of each Work: its rows of logits [R, V], copied to the host."""
    rows = logits.float().cpu().numpy()
    outputs: list[RowOutputs] = []
    first = 0
    for work in plan:
        outputs.append(RowOutputs(rows[first : first + work.num_logits_rows]))
        first += work.num_logits_rows
    return outputs
