"""What a verifier says of its work: the rate at which tokens come, and what draft tokens add to a forward.

It tells of the sessions that are open when it tells (verifier_service.served_rates); what is smoothed here follows
their number at once too. By a mean over the last rounds the sixteen requests of a burst decided as the two before them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.draft_policy import RoundOutcome
from gateway.running_means import FINEST_S, OUTLIER, blend

_WEIGHT = 0.05


@dataclass
class VerifierLoad:
    """Of the verifier that told last."""

    tokens_per_s: float | None = None
    # What 1, 2, ... draft tokens of every session add to a forward.
    draft_rows_s: tuple[float, ...] = ()
    batch_sessions: float = 1.0
    # Of the open sessions, those that a forward serves.
    served_share: float = 1.0
    # What a session waits for the verifier in a round without drafts; None: not told yet.
    plain_step_s: float | None = None

    def observe(self, outcome: RoundOutcome) -> None:
        self.tokens_per_s = outcome.tokens_per_s  # smoothed by the verifier already
        self.draft_rows_s = outcome.draft_rows_s
        num_served = max(1, outcome.batch_sessions)
        num_open = max(num_served, outcome.open_sessions)
        if outcome.verify_s > 0.0:  # else it read a prompt, beside few others
            self.served_share = blend(self.served_share, num_served / num_open, _WEIGHT)
            without_drafts_s = max(0.0, outcome.verify_s - self.rows_s(outcome.num_draft_tokens))
            usual_s = self.plain_step_s or without_drafts_s
            self.plain_step_s = blend(usual_s, min(without_drafts_s, OUTLIER * usual_s + FINEST_S), _WEIGHT)
        self.batch_sessions = max(1.0, self.served_share * num_open)

    def step_s(self, num_draft_tokens: int) -> float:
        """What a session waits for the verifier when all of its batch draft so many tokens."""
        return (self.plain_step_s or 0.0) + self.rows_s(num_draft_tokens)

    @property
    def plain_tokens_per_s(self) -> float | None:
        """What rounds without drafts would bring, as far as those with drafts tell."""
        return self.batch_sessions / self.plain_step_s if self.plain_step_s else None

    def rows_s(self, num_draft_tokens: float) -> float:
        """What so many draft tokens of each session add to a forward of all. Beyond the lengths that the verifier has
        told of, each costs as much as those did in the mean."""
        told = (0.0, *self.draft_rows_s)
        place = int(num_draft_tokens)
        if place < len(told) - 1:
            return told[place] + (num_draft_tokens - place) * (told[place + 1] - told[place])
        return told[-1] * num_draft_tokens / max(1, len(told) - 1)
