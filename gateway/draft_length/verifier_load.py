"""A verifier's load, from its commits: tokens per second, row prices, sessions in a forward.

Rates and prices are for the sessions open now (verifier_service/served_rates.py). What is smoothed here is a ratio per
open session, so it follows a burst of requests at once (docs/log.md: bdc3086).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from outrider.gateway.draft_length.draft_policy import RoundOutcome
from outrider.gateway.draft_length.running_means import FINEST_S, OUTLIER, blend
from outrider.shared.draft_policy.draft_prices import PRICED_DRAFTS

# weight of the newest round in the means, about 20 rounds; 381e5e7
_WEIGHT = 0.05


@dataclass
class VerifierLoad:
    """As of the newest commit."""

    tokens_per_s: float | None = None
    # Seconds that each length of PRICED_DRAFTS, drafted by every session, adds to a forward.
    draft_rows_s: tuple[float, ...] = ()
    # Mean sessions in a forward.
    batch_sessions: float = 1.0
    # Share of the open sessions that a forward serves.
    served_share: float = 1.0
    # Seconds of the verifier's step in a round without drafts; None: not known yet.
    plain_step_s: float | None = None

    def observe(self, outcome: RoundOutcome) -> None:
        self.tokens_per_s = outcome.tokens_per_s  # already smoothed by the verifier
        self.draft_rows_s = outcome.draft_rows_s
        num_served = max(1, outcome.batch_sessions)
        num_open = max(num_served, outcome.open_sessions)
        if outcome.verify_s > 0.0:  # else a prefill, in a forward with few sessions
            self.served_share = blend(self.served_share, num_served / num_open, _WEIGHT)
            without_drafts_s = max(0.0, outcome.verify_s - self.rows_s(outcome.num_draft_tokens))
            usual_s = self.plain_step_s or without_drafts_s
            self.plain_step_s = blend(usual_s, min(without_drafts_s, OUTLIER * usual_s + FINEST_S), _WEIGHT)
        self.batch_sessions = max(1.0, self.served_share * num_open)

    def step_s(self, num_draft_tokens: int) -> float:
        """Seconds of the verifier's step when every session of the batch drafts num_draft_tokens."""
        return (self.plain_step_s or 0.0) + self.rows_s(num_draft_tokens)

    @property
    def plain_tokens_per_s(self) -> float | None:
        """Estimated rate without drafts, from rounds with drafts."""
        return self.batch_sessions / self.plain_step_s if self.plain_step_s else None

    def rows_s(self, num_draft_tokens: float) -> float:
        """Seconds that a mean of num_draft_tokens per session adds to a forward. Interpolated between priced lengths;
        beyond them proportional.
        """
        if not self.draft_rows_s:
            return 0.0
        lengths, prices_s = PRICED_DRAFTS[: len(self.draft_rows_s)], self.draft_rows_s
        if num_draft_tokens >= lengths[-1]:
            return prices_s[-1] * num_draft_tokens / lengths[-1]
        above = bisect_right(lengths, num_draft_tokens)
        low, low_s = (lengths[above - 1], prices_s[above - 1]) if above else (0.0, 0.0)
        return low_s + (num_draft_tokens - low) * (prices_s[above] - low_s) / (lengths[above] - low)

    def proposals_s(self, num_draft_tokens: int, proposed: float) -> float:
        """Expected seconds that drafts add to a forward when each session has one with probability `proposed`.

        Given that at least one session has a draft: two-point quadrature over the binomial law, at one standard
        deviation below and above the mean.
        """
        proposed = min(1.0, proposed)
        no_draft: float = (1.0 - proposed) ** self.batch_sessions
        if no_draft >= 1.0:  # rounded: the probability of a draft is too small
            return 0.0
        mean = proposed / (1.0 - no_draft)
        second_moment = (proposed * (1.0 - proposed) / self.batch_sessions + proposed**2) / (1.0 - no_draft)
        spread = math.sqrt(max(0.0, second_moment - mean**2))
        fewer, more = (num_draft_tokens * min(1.0, max(0.0, share)) for share in (mean - spread, mean + spread))
        return (1.0 - no_draft) * 0.5 * (self.rows_s(fewer) + self.rows_s(more))

    def further_proposals_s(self, num_draft_tokens: int, proposed: float) -> float:
        """Expected seconds of one session's draft when the others draft too, times the sessions of a batch.

        Twice what the drafts of half the sessions add to those of the other half: the others have already paid for the
        first row beyond a step of the row costs (docs/log.md: e5370d5).
        """
        others_s = self.proposals_s(num_draft_tokens, 0.5 * proposed)
        return max(0.0, 2.0 * (self.proposals_s(num_draft_tokens, proposed) - others_s))
