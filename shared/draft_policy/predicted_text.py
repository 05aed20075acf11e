"""A text that a request predicts for its output (OpenAI's `prediction`), and where in it the output stands.

The output is followed token by token. Where it deviates, it is found again by the longest match of its last tokens, of
equal ones the nearest ahead. A short replacement that was made once is expected wherever the same predicted tokens come
again, until it is not made: a rename deviates once, not at each use. Drafts (drafting/methods/predicted.py) and the
usage that an answer reports both come from here, so that what counts as predicted depends on the tokens alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

# tokens; longest match compared when the position is searched again; the shortest is two
_LONGEST_MATCH = 32
# positions; equal pairs of tokens compared on each side, nearest first; a pair like "}\n" may be everywhere
_MOST_COMPARED = 8
# tokens; longest predicted part, and longest replacement, of an edit that is expected to be made again; a name, not a
# line
_LONGEST_EDIT = 8


class PredictedText:
    """Follows an output through a predicted text.

    match_len: tokens that agree in front of `position`, the next predicted token; position is None while lost.
    followed_len: tokens followed since it was last lost, expected replacements included.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._recent: list[int] = []
        # Per pair of tokens, the positions behind it; made at the first deviation.
        self._behind: dict[tuple[int, int], list[int]] | None = None
        self._lost_at = 0
        # Output since the text was lost. By the first token that was replaced: (predicted tokens, their replacement).
        self._deviation: list[int] = []
        self._edits: dict[int, tuple[list[int], list[int]]] = {}
        # The key of the edit being made, and the rest of its replacement, which is expected before `position`.
        self._edited = -1
        self._pending: list[int] = []
        self._appeared = bytearray(len(token_ids))
        self.position: int | None = 0
        self.match_len = 0
        self.followed_len = 0

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
        """Returns the tokens that are expected to follow; none while lost."""
        if self.position is None:
            return []
        position, token_ids = self.position, self._pending[:num_tokens]
        while len(token_ids) < num_tokens and position < len(self._token_ids):
            replaced, replacement = self._expected_edit(position)
            position += len(replaced)
            token_ids += replacement
        return token_ids[:num_tokens]

    def _expected_edit(self, position: int) -> tuple[Sequence[int], Sequence[int]]:
        """Returns the predicted tokens from `position` on that come next, and what is expected in their place."""
        token_id = self._token_ids[position]
        replaced, replacement = self._edits.get(token_id, ((), ()))
        if replaced and list(self._token_ids[position : position + len(replaced)]) == replaced:
            return replaced, replacement
        return (token_id,), (token_id,)

    def _add(self, token_id: int) -> None:
        self._recent = [*self._recent[1 - _LONGEST_MATCH :], token_id]
        if self.position is not None and self._is_followed(self.position, token_id):
            self.followed_len += 1
            return
        if self.position is not None:
            self._lost_at, self._deviation = self.position, []
        if len(self._deviation) <= 2 * _LONGEST_EDIT:
            self._deviation.append(token_id)
        self.position, self.match_len = self._found()
        self._pending, self.followed_len = [], self.match_len
        if self.position is not None:
            begin = self.position - self.match_len
            self._appeared[begin : self.position] = b"\1" * self.match_len
            self._learn_edit(begin)

    def _is_followed(self, position: int, token_id: int) -> bool:
        """Moves on if the token is expected, or predicted where a replacement was expected."""
        if self._pending:
            is_expected = self._pending.pop(0) == token_id
            if not is_expected:
                self._edits.pop(self._edited, None)
            return is_expected
        if position == len(self._token_ids):
            return False
        replaced, replacement = self._expected_edit(position)
        if token_id == self._token_ids[position]:
            if replacement[0] != token_id:
                del self._edits[token_id]
            self._appeared[position] = 1
            self.position, self.match_len = position + 1, self.match_len + 1
            return True
        if replacement[0] != token_id:
            return False
        self.position, self.match_len = position + len(replaced), 0
        self._edited, self._pending = replaced[0], list(replacement[1:])
        return True

    def _learn_edit(self, end: int) -> None:
        """Keeps what the deviation has replaced, up to the match that begins at `end`, if both are short."""
        replaced = list(self._token_ids[self._lost_at : end])
        replacement = self._deviation[: len(self._deviation) - self.match_len]
        if 0 < len(replaced) <= _LONGEST_EDIT and 0 < len(replacement) <= _LONGEST_EDIT:
            self._edits[replaced[0]] = (replaced, replacement)

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
