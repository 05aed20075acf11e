"""A text that a request predicts for its output (OpenAI's `prediction`), and where in it the output stands.

The output is followed token by token. Where it deviates, it is found again by the longest match of its last tokens, of
equal ones the nearest ahead. Drafts (drafting/methods/predicted.py) and the usage that an answer reports both come from
here, so that what counts as predicted depends on the tokens alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

# tokens; longest match compared when the position is searched again; the shortest is two
_LONGEST_MATCH = 32
# positions; equal pairs of tokens compared on each side, nearest first; a pair like "}\n" may be everywhere
_MOST_COMPARED = 8


class PredictedText:
    """Follows an output through a predicted text.

    match_len: tokens that agree in front of `position`, the next predicted token; position is None while lost.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._recent: list[int] = []
        # Per pair of tokens, the positions behind it; made at the first deviation.
        self._behind: dict[tuple[int, int], list[int]] | None = None
        self._lost_at = 0
        self._appeared = bytearray(len(token_ids))
        self.position: int | None = 0
        self.match_len = 0

    @property
    def num_accepted(self) -> int:
        """Predicted tokens that the output has, where it was followed."""
        return sum(self._appeared)

    @property
    def num_rejected(self) -> int:
        return len(self._token_ids) - self.num_accepted

    def extend(self, token_ids: Iterable[int]) -> None:
        """Follows the output's next tokens."""
        for token_id in token_ids:
            self._add(token_id)

    def continuation(self, num_tokens: int) -> list[int]:
        """Returns the predicted tokens that follow; none while lost."""
        return [] if self.position is None else list(self._token_ids[self.position : self.position + num_tokens])

    def _add(self, token_id: int) -> None:
        self._recent = [*self._recent[1 - _LONGEST_MATCH :], token_id]
        position = self.position
        if position is not None and position < len(self._token_ids) and self._token_ids[position] == token_id:
            self._appeared[position] = 1
            self.position, self.match_len = position + 1, self.match_len + 1
            return
        self._lost_at = self._lost_at if position is None else position
        self.position, self.match_len = self._found()
        if self.position is not None:
            begin = self.position - self.match_len
            self._appeared[begin : self.position] = b"\1" * self.match_len

    def _found(self) -> tuple[int | None, int]:
        """The position behind the longest match of the last tokens, and its length."""
        if len(self._recent) < 2:
            return None, 0
        places = self._pairs().get((self._recent[-2], self._recent[-1]), [])
        nearest = bisect_right(places, self._lost_at)
        ahead = places[nearest : nearest + _MOST_COMPARED]
        before = places[max(0, nearest - _MOST_COMPARED) : nearest]
        best: int | None = None
        longest = 0
        for place in (*ahead, *reversed(before)):
            length = self._match_len(place)
            if length > longest:
                best, longest = place, length
        return best, longest

    def _match_len(self, place: int) -> int:
        most = min(place, len(self._recent))
        pairs = zip(reversed(self._recent), reversed(self._token_ids[place - most : place]), strict=False)
        return next((length for length, (own, predicted) in enumerate(pairs) if own != predicted), most)

    def _pairs(self) -> dict[tuple[int, int], list[int]]:
        if self._behind is None:
            self._behind = {}
            for place in range(2, len(self._token_ids) + 1):
                pair = (self._token_ids[place - 2], self._token_ids[place - 1])
                self._behind.setdefault(pair, []).append(place)
        return self._behind
