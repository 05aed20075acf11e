"""How often a draft's first, second, third token is accepted, against the mean over all places.

The later tokens of a head are accepted less often than its first: an EAGLE-3 head that was asked for four tokens
brought 2.2 a round, where its mean acceptance of 0.8 at each place promised 2.4. Each place is known as a share of the
mean, which is all that a place needs to follow when other requests come that are harder to draft for.

The shares are those of the longest drafts there are. Shorter ones pass through easy text in more rounds and begin in
the midst of it (shorter_drafts), so that their first tokens look better, and would make the later ones, known from
longer drafts, promise too much.

Long drafts do not meet the text of all rounds either: where requests came together, they were made at the beginnings of
answers alone, in which n-grams find least. So the shares only tell how the places compare, and the mean over the drafts
of today says where all of them stand. Taken as they were seen, with 0.56 at the first place, a mean of 0.63 came out as
0.53, and one token promised 1.33 a round and brought 1.46 (16 sessions).

Not here: the mean itself (draft_costs), which hardly depends on the length (n-grams: 0.59, 0.62, 0.64 with drafts of
one, three, five).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

# So many tokens have to be expected at a place before what is seen of it counts as much as the mean.
_PRIOR_TOKENS = 6.0
# The mean is met in steps, one with each draft; by how much the places are raised or lowered for it at most.
_LARGEST_LEVEL = 2.0
# A length that is no longer drafted is forgotten by so much of a token with each draft: by one in about 1,000 rounds.
_FORGET_LENGTH = 0.05


@dataclass
class _Place:
    num_accepted: float = 0.0
    # As many as the mean, when they were seen, would have had accepted.
    num_expected: float = 0.0

    @property
    def share(self) -> float:
        return (self.num_accepted + _PRIOR_TOKENS) / (self.num_expected + _PRIOR_TOKENS)


@dataclass
class PlaceAcceptance:
    """Of one method, over all sessions. A place that is no longer drafted keeps its share."""

    _places: list[_Place] = field(default_factory=list)
    _drafted: float = 0.0
    # Times all shares, so that as many of the tokens that are looked at are accepted as in the mean.
    _level: float = 1.0

    @property
    def drafted_length(self) -> int:
        """Draft tokens of the rounds that the shares are of; 0: none yet."""
        return round(self._drafted)

    def observe(self, num_accepted: int, num_reached: int, num_wanted: int, mean: float, keep: float) -> None:
        """A draft of which the target looked at num_reached tokens. num_wanted: asked for, or would have been if the
        output did not end before. mean: of all sessions over all places; keep: what is left of earlier drafts, 0 to 1.
        """
        self._drafted = max(num_wanted, self._drafted - _FORGET_LENGTH * (1.0 - keep))
        if num_wanted >= self.drafted_length:
            while len(self._places) < num_reached:
                self._places.append(_Place())
            for index, place in enumerate(self._places[:num_reached]):
                place.num_accepted = keep * place.num_accepted + (index < num_accepted)
                place.num_expected = keep * place.num_expected + mean
        self._meet(mean)

    def _meet(self, mean: float) -> None:
        """One step towards the level at which the drafts that the shares are of have this mean."""
        survival = self.survival(mean, self.drafted_length)
        if survival and survival[0] > 0.0:
            of_reached = sum(survival) / (1.0 + sum(survival[:-1]))
            self._level = min(max(self._level * mean / of_reached, 1.0 / _LARGEST_LEVEL), _LARGEST_LEVEL)

    def observe_end(self, num_accepted: int, num_wanted: int, num_expected: float) -> None:
        """The output has ended behind num_accepted draft tokens. num_expected: as many as in the mean would have been
        accepted at the next place."""
        if num_accepted < len(self._places) and num_wanted >= self.drafted_length:
            self._places[num_accepted].num_expected += num_expected

    def survival(self, acceptance: float, num_tokens: int) -> list[float]:
        """Chances that the first 1, 2, ... num_tokens are accepted. acceptance: over all places, of whoever asks."""
        shares = [self._level * place.share for place in self._places[:num_tokens]]
        shares += [1.0] * (num_tokens - len(shares))
        return list(accumulate((min(1.0, acceptance * share) for share in shares), mul))
