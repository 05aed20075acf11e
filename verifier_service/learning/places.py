"""Which cache salts may have a head and texts of their own: those with most output lately. On the engine's thread.

Places are few, as each costs memory. Free ones go to whoever comes. A taken one goes to a salt that has served a
cycle's tokens more than its holder, so that whoever sends many salts pays for each place with so much output; a rule
by the time of the last request would cost next to nothing. A place has a number, which is never given twice: nothing
else of a salt leaves this process, or is logged.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.shared.errors import InvalidRequest

# salts; most that have a head of their own: each has weights, a cache of --local-kv-cache-mb and, in a round with
# sessions of several salts, a forward of its own
_MOST_PLACES = 8
# share of a place's memory that is for the newest text to train on (training/learner/windows: half of nine tenths)
_NEWEST_SHARE = 0.45
# tokens; least that a place's memory is for: a tenth is for held-back text, and a judgement needs 12 windows of 256
# tokens, of which two may not fit
_LEAST_PLACE_TOKENS = 10 * (12 + 2) * 256
# The number of no place; windows of a head for all have it.
NO_PLACE = 0
# salts; most whose output is counted, of at most 256 characters each; beyond it the one with the least output is
# forgotten
_MOST_COUNTED = 1024
# cycles per place; when all salts together have had so much output, every count is halved, so that a tenant who
# has gone gives way
_HALVED_AFTER = 8


class SaltPlaces:
    """`num_places` places. cycle_tokens: output tokens that are worth training a head."""

    def __init__(self, num_places: int, cycle_tokens: int) -> None:
        self._num_places, self._cycle_tokens = num_places, cycle_tokens
        self._tokens: dict[str, float] = {}
        self._num_tokens = 0
        self._salts: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._last_number = NO_PLACE
        # Called with the number and the salt of a place that is lost.
        self.on_lost: Callable[[int, str], None] = lambda _number, _salt: None

    def __contains__(self, number: int) -> bool:
        """From any thread."""
        return number in self._salts

    def __len__(self) -> int:
        return len(self._salts)

    def serve(self, salt: str, num_tokens: int) -> int:
        """Counts output for the salt, and returns the number of its place; NO_PLACE: it has none."""
        self._count(salt, num_tokens)
        if salt not in self._numbers:
            if len(self._salts) >= self._num_places:
                least = min(self._numbers, key=self._tokens.__getitem__)
                if self._tokens[salt] < self._tokens[least] + self._cycle_tokens:
                    return NO_PLACE
                lost = self._numbers.pop(least)
                del self._salts[lost]
                self.on_lost(lost, least)
            self._last_number += 1
            self._numbers[salt] = self._last_number
            self._salts[self._last_number] = salt
        return self._numbers[salt]

    def salt_of(self, number: int) -> str:
        """Raises InvalidRequest for a place that was lost."""
        if number not in self._salts:
            raise InvalidRequest("the salt that it is for has lost its place to one with more output")
        return self._salts[number]

    def _count(self, salt: str, num_tokens: int) -> None:
        self._tokens[salt] = self._tokens.get(salt, 0.0) + num_tokens
        self._num_tokens += num_tokens
        if self._num_tokens >= _HALVED_AFTER * self._num_places * self._cycle_tokens:
            self._num_tokens = 0
            self._tokens = {each: tokens / 2 for each, tokens in self._tokens.items()}
        if len(self._tokens) > _MOST_COUNTED:
            others = (each for each in self._tokens if each not in self._numbers and each != salt)
            del self._tokens[min(others, key=self._tokens.__getitem__)]


def num_places_in(buffer_bytes: int, row_bytes: int, cycle_tokens: int) -> int:
    """Returns for how many salts the memory is enough, one at least. row_bytes: hidden states of a token."""
    place_tokens = max(int(cycle_tokens / _NEWEST_SHARE), _LEAST_PLACE_TOKENS)
    return max(1, min(_MOST_PLACES, buffer_bytes // (place_tokens * row_bytes)))
