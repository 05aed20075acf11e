"""The served texts that a learner keeps: bounded memory, the newest and a sample of all that came before.

Windows of some sessions are held back: no head is trained on them, and heads are judged on nothing else.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from outrider.training.heads.interface import Batch, TargetReadOut, TargetView

# share of the memory; for windows that no head is trained on: one session in ten is held back
HELD_BACK_SHARE = 0.1


@dataclass(frozen=True)
class Window:
    """Consecutive positions of one session: `token_ids` int64[T]; from `first_counted` on they are output.

    rows [T, layers * hidden_size]: the target's hidden states that the head reads, then the final norm's output.
    """

    token_ids: torch.Tensor
    first_counted: int
    rows: torch.Tensor
    hidden_size: int

    @property
    def num_counted(self) -> int:
        return len(self.token_ids) - self.first_counted

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + self.token_ids.nbytes


class Pool:
    """At most `max_bytes` of windows: half for the newest, half for a uniform sample of those that had to leave.

    The sample is what keeps a head from forgetting older traffic (Vitter 1985, algorithm R, over bytes).
    """

    def __init__(self, max_bytes: int, seed: int) -> None:
        self._max_bytes = max_bytes // 2
        self._random = random.Random(seed)
        self._newest: deque[Window] = deque()
        self._newest_bytes = 0
        self._sample: list[Window] = []
        self._sample_bytes = 0
        self._num_left = 0
        # Counted tokens of all windows that ever came.
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._newest) + len(self._sample)

    def add(self, window: Window) -> None:
        """Adds a window; one that is larger than half of the memory is not kept."""
        if window.num_bytes > self._max_bytes:
            return
        self.num_tokens += window.num_counted
        self._newest.append(window)
        self._newest_bytes += window.num_bytes
        while self._newest_bytes > self._max_bytes:
            oldest = self._newest.popleft()
            self._newest_bytes -= oldest.num_bytes
            self._keep_by_chance(oldest)

    def _keep_by_chance(self, window: Window) -> None:
        self._num_left += 1
        if self._sample_bytes + window.num_bytes > self._max_bytes:
            place = self._random.randrange(self._num_left)
            if place >= len(self._sample):
                return
            self._sample_bytes -= self._sample[place].num_bytes
            self._sample[place] = self._sample[-1]
            self._sample.pop()
        self._sample.append(window)
        self._sample_bytes += window.num_bytes

    def newest(self, num_tokens: int) -> list[Window]:
        """Returns the newest windows that together have `num_tokens` counted tokens, or all of them, newest first."""
        found: list[Window] = []
        for window in reversed(self._newest):
            if num_tokens <= 0:
                break
            found.append(window)
            num_tokens -= window.num_counted
        return found

    def older(self, num_newest: int) -> list[Window]:
        """Returns what is kept besides the `num_newest` newest windows."""
        return [*self._sample, *list(self._newest)[: max(0, len(self._newest) - num_newest)]]


class Texts:
    """What is kept to train one head on, and of other sessions to judge it by."""

    def __init__(self, max_bytes: int) -> None:
        self.trained_on = Pool(int((1 - HELD_BACK_SHARE) * max_bytes), seed=0)
        self.held_back = Pool(int(HELD_BACK_SHARE * max_bytes), seed=1)

    def add(self, window: Window, *, is_held_back: bool) -> None:
        (self.held_back if is_held_back else self.trained_on).add(window)


def batch_of(
    windows: Sequence[Window], read_out: TargetReadOut, vocab_size: int, num_features: int
) -> tuple[Batch, TargetView]:
    """Pads windows on the right into one batch, and the target's view of it.

    num_features: columns of the rows that the head reads. The last of the rows' hidden states is the final norm's.
    """
    batch = Batch.padded([window.token_ids for window in windows], [window.first_counted for window in windows])
    rows = pad_sequence([window.rows for window in windows], batch_first=True).float()
    hidden_size = windows[0].hidden_size
    return batch, TargetView(rows[..., :num_features], rows[..., -hidden_size:], read_out, vocab_size)
