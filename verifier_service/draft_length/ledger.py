"""The account that drafting is paid from (conservative bandits: Wu, Shariff, Lattimore and Szepesvári, 2016).

Each round brings in the time that plain decoding would have taken for its tokens, and takes out its own. Drafting and
looks need credit, so wrong decisions included drafting never loses more than LOSS_SHARE of the time and the credit.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.verifier_service.draft_length.limits import (
    CREDIT_ROUNDS,
    GAIN_MEMORY,
    LOOK_ROUNDS,
    LOOK_SHARE,
    LOSS_SHARE,
)


@dataclass
class Ledger:
    """The account's state.

    credit_s: seconds of plain decoding. gain: recent mean speed-up over plain decoding, minus 1.
    """

    credit_s: float = 0.0
    gain: float = 0.0
    _is_open: bool = False
    _is_blocked: bool = False

    def observe(self, plain_s: float, seconds: float, plain_round_s: float) -> None:
        """Accounts for one round. plain_s: what plain decoding would have taken for its tokens."""
        most_s = CREDIT_ROUNDS * plain_round_s
        if not self._is_open:
            self._is_open, self.credit_s = True, most_s
        self.credit_s = min(most_s, self.credit_s + plain_s - (1.0 - LOSS_SHARE) * seconds)
        self.gain += (plain_s / seconds - 1.0 - self.gain) / GAIN_MEMORY

    def allows_drafts(self, plain_round_s: float) -> bool:
        """Returns whether there is credit for drafts.

        Drafting that has stopped begins again with half of the most credit, or when a look has gained.
        """
        least_s = 0.5 * CREDIT_ROUNDS * plain_round_s if self._is_blocked else 0.0
        self._is_blocked = self.credit_s <= least_s
        return not self._is_blocked

    def look_gained(self, plain_round_s: float) -> float:
        """Lets drafting begin again after a look that has gained, without credit with a small one; returns that."""
        self._is_blocked = False
        credit_s = max(self.credit_s, LOOK_ROUNDS * plain_round_s)
        lent_s, self.credit_s = credit_s - self.credit_s, credit_s
        return lent_s

    def look_share(self, *, is_drafting: bool) -> float:
        """Share of the time that looks may cost now: more where drafting has gained, and has stopped."""
        return LOOK_SHARE if is_drafting else LOOK_SHARE + max(0.0, self.gain)
