"""What a verifier says of its work: the rate at which tokens come, and what draft tokens add to a forward.

It tells of the sessions that are open when it tells (verifier_service.served_rates); what is smoothed here follows
their number at once too. By a mean over the last rounds the sixteen requests of a burst decided as the two before them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from gateway.draft_policy import RoundOutcome
from gateway.running_means import FINEST_S, OUTLIER, blend
from shared.draft_prices import PRICED_DRAFTS

_WEIGHT = 0.05


@dataclass
class VerifierLoad:
    """Of the verifier that told last."""

    tokens_per_s: float | None = None
    # What so many draft tokens of every session (PRICED_DRAFTS) add to a forward.
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
        """What so many draft tokens of each session, in the mean, add to a forward of all. Beyond the lengths that the
        verifier has told of, each costs as much as those did in the mean."""
        if not self.draft_rows_s:
            return 0.0
        lengths, prices_s = PRICED_DRAFTS[: len(self.draft_rows_s)], self.draft_rows_s
        if num_draft_tokens >= lengths[-1]:
            return prices_s[-1] * num_draft_tokens / lengths[-1]
        above = bisect_right(lengths, num_draft_tokens)
        low, low_s = (lengths[above - 1], prices_s[above - 1]) if above else (0.0, 0.0)
        return low_s + (num_draft_tokens - low) * (prices_s[above] - low_s) / (lengths[above] - low)

    def proposals_s(self, num_draft_tokens: int, proposed: float) -> float:
        """What drafts of so many tokens add in the mean, where any session has one with the chance `proposed`.

        Either nobody has, or somebody: then one time more, one time fewer than usual, by a standard deviation
        (two-point quadrature over the binomial law).
        """
        proposed = min(1.0, proposed)
        nobody: float = (1.0 - proposed) ** self.batch_sessions
        if nobody >= 1.0:  # so rarely that the chance is lost in rounding
            return 0.0
        mean = proposed / (1.0 - nobody)
        second_moment = (proposed * (1.0 - proposed) / self.batch_sessions + proposed**2) / (1.0 - nobody)
        spread = math.sqrt(max(0.0, second_moment - mean**2))
        fewer, more = (num_draft_tokens * min(1.0, max(0.0, share)) for share in (mean - spread, mean + spread))
        return (1.0 - nobody) * 0.5 * (self.rows_s(fewer) + self.rows_s(more))

    def further_proposals_s(self, num_draft_tokens: int, proposed: float) -> float:
        """What the drafts of a session add beside those of others, times the sessions: the half of them that comes to
        the other. The first row beyond a step of the staircase costs all of it, and is there already. Held to the mean
        of all rows, half of 16 sessions drafted nothing where all together got 1.08 of what they got so.
        """
        others_s = self.proposals_s(num_draft_tokens, 0.5 * proposed)
        return max(0.0, 2.0 * (self.proposals_s(num_draft_tokens, proposed) - others_s))
