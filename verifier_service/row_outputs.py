"""What a forward left of one session's rows: their logits on the host, or what was drawn from them on the device.

Not here: the drawing (device_sampling) and what is decided from it (round).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from verifier_service.acceptance.outcome import Acceptance
from verifier_service.scheduler import Work

NO_LOGITS: NDArray[np.float32] = np.empty((0, 0), dtype=np.float32)


@dataclass(frozen=True)
class RowOutputs:
    """logits float32 [N, V] of the session's N wanted rows, in order; or, instead of them, one of the other two.

    token_ids int64 [N] are what the target draws after each row: the accepted path is where the draft foresaw them.
    acceptance is what a rule made of the rows and the proposal.
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
    """For each piece of work its rows of logits [R, V], brought to the host where they are not."""
    rows = logits.float().cpu().numpy()
    outputs: list[RowOutputs] = []
    first = 0
    for work in plan:
        outputs.append(RowOutputs(rows[first : first + work.num_logits_rows]))
        first += work.num_logits_rows
    return outputs
