"""How many rows a forward may have that reads prompts while others decode, so that those get their pieces in time.

What a forward costs by its rows is where it begins (step_costs.py). But a stream waits for more than one forward: for
one that had begun before its turn came, for its drafter, for long contexts, for whatever else the machine does. So from
there the rows are led by the times between pieces themselves, as a quantile is tracked: a late piece takes off nineteen
times what a piece in time adds, which comes to rest where one in twenty is late.
"""

from __future__ import annotations

import math

from verifier_service.scheduler import LEAST_PROMPT_ROWS
from verifier_service.step_costs import StepCosts

# Of a piece that came late, on the natural logarithm of the rows: from 512 rows to 16 in 18 late pieces.
_STEP = 0.2
# The share of late pieces at which the rows stay where they are.
_LATE_SHARE = 0.05
# The part of the promised time that a session may at most take for itself, between a commit and its next question.
_MOST_AWAY = 0.5


class PromptAllowance:
    """For one promise; all times are seconds of one clock. Belongs to the engine's thread."""

    def __init__(self, promised_s: float, costs: StepCosts, max_rows: int) -> None:
        self._promised_s = promised_s
        self._most = math.log(max_rows)
        self._log_rows = min(math.log(max(LEAST_PROMPT_ROWS, costs.rows_within(promised_s, max_rows))), self._most)
        self._prompts_read_at = -math.inf

    def num_rows(self) -> int:
        """Rows of all sessions in a forward that reads prompts."""
        return round(math.exp(self._log_rows))

    def read_prompts(self, ended: float) -> None:
        """A forward with rows of prompts has ended."""
        self._prompts_read_at = ended

    def committed(self, last_committed: float, asked: float, now: float) -> None:
        """A session's next tokens, when it asked for them, and when it got those before. Only one that has waited for a
        forward with prompts tells something.
        """
        if self._prompts_read_at <= asked:
            return
        # A client that reads slowly, or a drafter that hangs, is not mended by shorter prompts.
        away_s = min(asked - last_committed, _MOST_AWAY * self._promised_s)
        late = away_s + now - asked > self._promised_s
        change = -_STEP if late else _STEP * _LATE_SHARE / (1.0 - _LATE_SHARE)
        self._log_rows = min(max(self._log_rows + change, math.log(LEAST_PROMPT_ROWS)), self._most)
