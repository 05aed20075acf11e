"""Decides how many tokens of a request's predicted output a round drafts, by an account of its own for each session.

A prediction is right or wrong for its own request, so nothing is learned from other sessions and no trial comes first.
It drafts from the first round, at the length that pays by the cost model and by what it has confirmed so far. What its
wrong drafts have cost is paid from a small credit; without credit it is only followed, until a long match shows again
that the output is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.shared.request_params import MAX_SPECULATIVE_TOKENS
from outrider.verifier_service.draft_length.limits import (
    LOOK_ROUNDS,
    MIN_GAIN,
    PREDICTION_CREDIT,
    PREDICTION_MEMORY,
    PREDICTION_PROOF,
    PREDICTION_STEADY,
)


@dataclass
class _Chance:
    """Share of predicted tokens that were accepted, with an exponential memory. The initial counts are the prior."""

    accepted: float
    tried: float

    @property
    def mean(self) -> float:
        return self.accepted / self.tried

    def observe(self, num_accepted: int, num_tried: int) -> None:
        keep = (1.0 - 1.0 / PREDICTION_MEMORY) ** num_tried
        self.accepted = keep * self.accepted + num_accepted
        self.tried = keep * self.tried + num_tried


@dataclass(frozen=True, slots=True)
class PredictionCosts:
    """Costs of a round. plain_s: without predicted drafts, per session. drafts_s: that a draft adds to it, by length,
    from 0 on.
    """

    plain_s: float
    drafts_s: Sequence[float]

    def of(self, length: int) -> float:
        return self.drafts_s[min(length, len(self.drafts_s) - 1)]


class CostsOfPredictions:
    """The current costs of drafts from predictions, by the verifier's cost model.

    seconds: of a forward, by its rows. rows_s: as in DraftLength.
    """

    def __init__(self, seconds: Callable[[float], float], rows_s: Callable[[float, float], float]) -> None:
        self._seconds = seconds
        self._rows_s = rows_s
        # By (decoding sessions, those that draft from a prediction); and for how many calls it is kept.
        self._known: dict[tuple[int, int], PredictionCosts] = {}
        self._calls_left = 0

    def of(self, num_sessions: int, num_drafting: int, plain_round_s: float, max_round_s: float) -> PredictionCosts:
        """Returns the costs, up to LOOK_ROUNDS calls old: computing them takes longer than a draft.

        plain_round_s: measured; 0: not known. max_round_s: lengths whose rounds would take longer are left out.
        """
        self._calls_left -= 1
        if self._calls_left <= 0:
            self._known, self._calls_left = {}, LOOK_ROUNDS
        key = num_sessions, num_drafting
        if key not in self._known:
            plain_s = max(plain_round_s, self._seconds(num_sessions))
            drafts_s = [0.0]
            for length in range(1, MAX_SPECULATIVE_TOKENS + 1):
                added_s = self._rows_s(num_sessions, length * num_drafting / num_sessions)
                if plain_s + added_s > max_round_s:
                    break
                drafts_s.append(added_s / num_drafting)
            self._known[key] = PredictionCosts(plain_s / num_sessions, drafts_s)
        return self._known[key]


@dataclass
class PredictionLength:
    """The account of one session. credit_rounds: plain rounds that wrong drafts may still cost.

    Tokens that follow a short match are accepted less often than those after a long one: each has its own chance.
    """

    credit_rounds: float = PREDICTION_CREDIT
    _fresh: _Chance = field(default_factory=lambda: _Chance(3.0, 4.0))
    _steady: _Chance = field(default_factory=lambda: _Chance(9.7, 10.0))

    def choose(self, followed_len: int, most: int, costs: PredictionCosts) -> int:
        """Returns the draft's length, 0 to `most`. followed_len: tokens followed since the text was last lost."""
        if self.credit_rounds <= 0.0 and followed_len < PREDICTION_PROOF:
            return 0
        best, best_gain, tokens, chance = 0, 1.0 + MIN_GAIN, 1.0, 1.0
        for length in range(1, min(most + 1, len(costs.drafts_s))):
            chance *= self._chance_at(followed_len + length - 1).mean
            tokens += chance
            gain = tokens * costs.plain_s / (costs.plain_s + costs.drafts_s[length])
            if gain > best_gain:
                best, best_gain = length, gain
        return best

    def observe(self, followed_len: int, num_proposed: int, num_accepted: int, costs: PredictionCosts) -> None:
        """Accounts for a draft. followed_len: before it."""
        num_tried = min(num_accepted + 1, num_proposed)
        num_fresh = min(max(0, PREDICTION_STEADY - followed_len), num_tried)
        fresh_accepted = min(num_fresh, num_accepted)
        if num_fresh:
            self._fresh.observe(fresh_accepted, num_fresh)
        if num_tried > num_fresh:
            self._steady.observe(num_accepted - fresh_accepted, num_tried - num_fresh)
        earned = num_accepted - costs.of(num_proposed) / costs.plain_s
        self.credit_rounds = min(PREDICTION_CREDIT, self.credit_rounds + earned)

    def _chance_at(self, followed_len: int) -> _Chance:
        return self._fresh if followed_len < PREDICTION_STEADY else self._steady
