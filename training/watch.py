"""Looks on at a training: counts tokens a round on held-out answers, and says when it may end.

Not here: the loop that asks (training/train.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from outrider.training.head_trainer import HeadTrainer
from outrider.training.replay import head_drafter, tokens_per_round


class Watch:
    """rows: held-out answers, written greedily. until: tokens a round that are enough; None: no number is.

    deadline: in time.monotonic()'s seconds.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], draft_len: int, until: float | None, deadline: float) -> None:
        self._rows, self._draft_len, self._until, self._deadline = rows, draft_len, until, deadline
        self.tokens_per_round = 0.0

    def measure(self, trainer: HeadTrainer) -> float:
        """Tokens a round of the head as it is now, to two places."""
        objective: Any = trainer.objective.eval()
        with trainer.accelerator.autocast():
            drafter = head_drafter(objective.head, trainer.target)
            self.tokens_per_round = round(tokens_per_round(self._rows, self._draft_len, drafter), 2)
        return self.tokens_per_round

    @property
    def is_enough(self) -> bool:
        return self._until is not None and self.tokens_per_round >= self._until

    @property
    def time_is_up(self) -> bool:
        return time.monotonic() >= self._deadline
