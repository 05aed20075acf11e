"""Limits the rows of a forward with prompts, so that decoding sessions meet their inter-token latency objective.

The first value comes from the cost model (step_costs.py). A stream also waits for a forward already running, its
drafter, long contexts and other processes. So the value then follows the measured times between commits by stochastic
quantile tracking: a late commit lowers it by nineteen times what one in time adds, which settles at one late in twenty.
"""

from __future__ import annotations

import math

from outrider.verifier_service.scheduler import MIN_PROMPT_ROWS
from outrider.verifier_service.timing.step_costs import StepCosts

# natural logarithm of rows; change per late commit; a80adfd: 512 rows to 16 in 18 late commits
_STEP = 0.2
# share of late commits at which the rows stay as they are; chosen: the objective is a 95th percentile
_LATE_SHARE = 0.05
# share of the objective; bounds what counts of the time between a commit and the next step; a80adfd
_MAX_AWAY_SHARE = 0.5


class PromptAllowance:
    """The row limit of forwards with prompts. Belongs to the engine's thread.

    slo_itl_s: longest time between two commits of a session. Times: seconds of one clock.
    """

    def __init__(self, slo_itl_s: float, costs: StepCosts, max_rows: int) -> None:
        self._slo_itl_s = slo_itl_s
        self._max_log_rows = math.log(max_rows)
        self._log_rows = min(math.log(max(MIN_PROMPT_ROWS, costs.rows_within(slo_itl_s, max_rows))), self._max_log_rows)
        self._prompts_read_at = -math.inf

    def num_rows(self) -> int:
        """Most rows, of all sessions together, of a forward that reads prompts."""
        return round(math.exp(self._log_rows))

    def read_prompts(self, ended: float) -> None:
        """Records that a forward with rows of prompts has ended."""
        self._prompts_read_at = ended

    def committed(self, last_committed: float, asked: float, now: float) -> None:
        """Learns from a commit at `now` for a step asked for at `asked`.

        It counts only if a forward with prompts has ended since. The session's previous commit was at `last_committed`.
        """
        if self._prompts_read_at <= asked:
            return
        # Shorter prompts do not help against a slow client or a hung drafter.
        away_s = min(asked - last_committed, _MAX_AWAY_SHARE * self._slo_itl_s)
        late = away_s + now - asked > self._slo_itl_s
        change = -_STEP if late else _STEP * _LATE_SHARE / (1.0 - _LATE_SHARE)
        self._log_rows = min(max(self._log_rows + change, math.log(MIN_PROMPT_ROWS)), self._max_log_rows)
