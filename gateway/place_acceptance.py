"""How often a draft's first, second, third token is accepted, against the mean over all places.

The later tokens of a head are accepted less often than its first: an EAGLE-3 head that was asked for four tokens
brought 2.2 a round, where its mean acceptance of 0.8 at each place promised 2.4.

Not here: the mean itself (draft_costs).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

# So many tokens at a place have to be seen before they are believed as much as the mean.
_PRIOR_TOKENS = 8.0


@dataclass
class _Place:
    num_accepted: float = 0.0
    num_reached: float = 0.0


@dataclass
class PlaceAcceptance:
    """Of one method, over all sessions. A place that is no longer drafted keeps what was seen of it."""

    _places: list[_Place] = field(default_factory=list)

    def observe(self, num_accepted: int, num_reached: int, keep: float) -> None:
        """A draft of which the target looked at num_reached tokens; keep: what is left of earlier ones, 0 to 1."""
        while len(self._places) < num_reached:
            self._places.append(_Place())
        for index, place in enumerate(self._places[:num_reached]):
            place.num_accepted = keep * place.num_accepted + (index < num_accepted)
            place.num_reached = keep * place.num_reached + 1.0

    def survival(self, mean: float, acceptance: float, num_tokens: int) -> list[float]:
        """Chances that the first 1, 2, ... num_tokens are accepted. mean: of all sessions over all places; acceptance:
        the same of the session that asks."""
        ratio = acceptance / mean if mean > 0.0 else 1.0
        chances = (min(1.0, ratio * self._chance(index, mean)) for index in range(num_tokens))
        return list(accumulate(chances, mul))

    def _chance(self, index: int, mean: float) -> float:
        place = self._places[index] if index < len(self._places) else _Place()
        return (place.num_accepted + _PRIOR_TOKENS * mean) / (place.num_reached + _PRIOR_TOKENS)
