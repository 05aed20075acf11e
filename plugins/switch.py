"""Whether drafts pay: tokens per second with and without them, compared in trials while the engine serves.

Drafts cost the time until they come and rows that the target computes; a batch that leaves the target no idle
arithmetic, or drafts that are seldom right, make them a loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# steps; a trial alternates blocks with and without drafts, so that what else the machine does meets both. The first
# steps of a block are left out: they have drafts of the block before, or a drafter that has to catch up.
_BLOCK, _LEFT_OUT, _NUM_BLOCKS = 8, 3, 8
# steps; until the next trial, doubled while the result repeats
_FIRST_GAP, _LONGEST_GAP = 128, 4096
# ratio; drafting changes to off below its inverse, and back on above it
_MARGIN = 1.03


@dataclass
class _Rate:
    tokens: int = 0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class _Size:
    """What is known at one size of batch. num_steps: since the end of the last trial. rates: without drafts, with."""

    is_on: bool = True
    num_steps: int = 0
    gap: int = _FIRST_GAP
    rates: tuple[_Rate, _Rate] = field(default_factory=lambda: (_Rate(), _Rate()))

    @property
    def drafts(self) -> bool:
        block = (self.num_steps - self.gap) // _BLOCK
        return self.is_on if block < 0 else bool(block % 2) == self.is_on


class Switch:
    """Decides by the size of the batch, in powers of two."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def wants(self, num_rows: int) -> bool:
        return self._size(num_rows).drafts

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> bool | None:
        """Takes a step that only decoded, as `wants` said; returns the new decision where a trial has changed it."""
        size = self._size(num_rows)
        in_trial = size.num_steps - size.gap
        if in_trial >= 0 and in_trial % _BLOCK >= _LEFT_OUT:
            rate = size.rates[size.drafts]
            rate.tokens, rate.seconds = rate.tokens + num_tokens, rate.seconds + seconds
        size.num_steps += 1
        if in_trial + 1 < _BLOCK * _NUM_BLOCKS:
            return None
        without, with_drafts = (rate.per_second for rate in size.rates)
        is_on = with_drafts > (without / _MARGIN if size.is_on else without * _MARGIN)
        changes = is_on != size.is_on
        gap = _FIRST_GAP if changes else min(_LONGEST_GAP, 2 * size.gap)
        self._sizes[num_rows.bit_length()] = _Size(is_on, gap=gap)
        return is_on if changes else None

    def _size(self, num_rows: int) -> _Size:
        return self._sizes.setdefault(num_rows.bit_length(), _Size())
