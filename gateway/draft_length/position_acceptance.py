"""Acceptance per draft position, as ratios to the mean acceptance over all positions.

A head's later tokens are accepted less often than its first. The ratios outlast a change of requests: only the mean
moves with harder or easier text.

Ratios are learned from the longest drafts alone. Shorter drafts pass through easy text in more rounds (shorter_drafts),
so their first tokens look better. Long drafts are biased too: in a burst of requests they are made at the start of
answers only. So all ratios are scaled together until the modelled mean equals the measured one (docs/log.md: 56f2224).

Not here: the mean itself (draft_costs), which hardly depends on the draft length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

# accepted tokens; weight of the prior ratio of 1; 4df0d8f
_PRIOR_TOKENS = 6.0
# factor; largest correction of all ratios towards the mean; 56f2224
_MAX_SCALE = 2.0
# tokens; decay of the longest length per unit of forgetting (1 - keep); bd9aba7: one token in about 1,000 rounds
_LENGTH_DECAY = 0.05


@dataclass
class _Position:
    num_accepted: float = 0.0
    # Tokens that the mean acceptance at that time would have had accepted here.
    num_expected: float = 0.0

    @property
    def ratio(self) -> float:
        return (self.num_accepted + _PRIOR_TOKENS) / (self.num_expected + _PRIOR_TOKENS)


@dataclass
class PositionAcceptance:
    """Of one method, over all sessions. A position that is no longer drafted keeps its ratio."""

    _positions: list[_Position] = field(default_factory=list)
    # Draft tokens; decays while only shorter drafts are made.
    _longest: float = 0.0
    # Common factor of all ratios.
    _scale: float = 1.0

    @property
    def drafted_length(self) -> int:
        """Length of the drafts that the ratios are learned from; 0: none yet."""
        return round(self._longest)

    def observe(self, num_accepted: int, num_reached: int, num_wanted: int, mean: float, keep: float) -> None:
        """Learns from a draft. num_reached: tokens up to and with the first rejection. num_wanted: tokens requested, as
        if the output did not end. mean: acceptance over all sessions and positions. keep: weight of earlier drafts.
        """
        self._longest = max(num_wanted, self._longest - _LENGTH_DECAY * (1.0 - keep))
        if num_wanted >= self.drafted_length:
            while len(self._positions) < num_reached:
                self._positions.append(_Position())
            for index, position in enumerate(self._positions[:num_reached]):
                position.num_accepted = keep * position.num_accepted + (index < num_accepted)
                position.num_expected = keep * position.num_expected + mean
        self._scale_towards(mean)

    def _scale_towards(self, mean: float) -> None:
        """One fixed-point step towards the scale at which drafts of drafted_length have this mean acceptance."""
        survival = self.survival(mean, self.drafted_length)
        if survival and survival[0] > 0.0:
            of_reached = sum(survival) / (1.0 + sum(survival[:-1]))
            self._scale = min(max(self._scale * mean / of_reached, 1.0 / _MAX_SCALE), _MAX_SCALE)

    def observe_end(self, num_accepted: int, num_wanted: int, num_expected: float) -> None:
        """The output ended after num_accepted draft tokens, which counts as a rejection at the next position.
        num_expected: tokens that the mean acceptance would have had accepted there.
        """
        if num_accepted < len(self._positions) and num_wanted >= self.drafted_length:
            self._positions[num_accepted].num_expected += num_expected

    def survival(self, acceptance: float, num_tokens: int) -> list[float]:
        """Probabilities that the first 1, 2, ... num_tokens are all accepted. acceptance: mean over all positions."""
        ratios = [self._scale * position.ratio for position in self._positions[:num_tokens]]
        ratios += [1.0] * (num_tokens - len(ratios))
        return list(accumulate((min(1.0, acceptance * ratio) for ratio in ratios), mul))
