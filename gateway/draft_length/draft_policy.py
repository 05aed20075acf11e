"""The contract of draft policies, which decide method and length, and the policy with a fixed method and length."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Protocol

from outrider.gateway.request.types import METHOD_AUTO


@dataclass(frozen=True)
class RoundOutcome:
    """One round of a session, as measured by the gateway."""

    # Draft tokens requested (0: no draft requested), proposed and accepted.
    num_asked: int
    num_draft_tokens: int
    num_accepted: int
    # Sessions in the forward (messages.Timings).
    batch_sessions: int
    # Seconds that each length of PRICED_DRAFTS, drafted by every session, would add to the forward.
    draft_rows_s: tuple[float, ...]
    # Of the whole verifier.
    tokens_per_s: float
    # Seconds of drafting, and of the round beyond drafting and the verifier's work.
    draft_s: float
    overhead_s: float
    # Seconds of the verifier's work, gathering included; 0: not known.
    verify_s: float = 0.0
    # The method asked; "" if none was.
    method: str = ""
    # The verifier's last round: tokens of all sessions, and seconds; 0: not meaningful (NO_ROUND).
    round_tokens: int = 0
    round_s: float = 0.0
    # Sessions open at the verifier, in this forward or not; 0: not known.
    open_sessions: int = 0
    # Whether the draft may have been requested before the round began, which makes its overhead small.
    may_be_ahead: bool = False
    # Whether the drafter first had to read the prompt or other committed tokens: not typical of further answers.
    is_catch_up: bool = False
    # Local drafting: the most draft tokens that a session of the batch asked for; draft_s is then of the whole batch.
    # 0: no local draft.
    draft_depth: int = 0
    # Draft tokens beyond the end of the output, which were not requested.
    num_beyond_end: int = 0


@dataclass(frozen=True)
class LateAnswer:
    """A draft that came too late for its round, compared with what was committed meanwhile."""

    method: str
    num_asked: int
    num_draft_tokens: int
    num_accepted: int  # would have been
    draft_s: float
    overhead_s: float
    is_catch_up: bool = False  # as in RoundOutcome


class DraftPolicy(Protocol):
    """Contract: `num_draft_tokens` is called before each round; 0: decode without drafts for `free_run` tokens. With
    local drafting the result holds for `free_run` tokens. before_prefill: nothing is drafted in this round, but a
    drafter wanted after it can read the prompt.

    `method`: the method to ask, which may change between rounds; "auto": any. `patience_s`: how long an answer is worth
    waiting for, as of the last call of `num_draft_tokens`. `observe` is called for every round, `observe_late` for
    every late answer.
    """

    @property
    def method(self) -> str: ...

    @property
    def patience_s(self) -> float: ...

    def num_draft_tokens(self, *, before_prefill: bool = False) -> int: ...

    def free_run(self) -> int: ...

    def observe(self, outcome: RoundOutcome) -> None: ...

    def observe_late(self, answer: LateAnswer) -> None: ...


class FixedDraftLength:
    """Always the same method and length, for a request that names its method."""

    def __init__(self, num_draft_tokens: int, method: str = METHOD_AUTO) -> None:
        self.method = method
        self.patience_s = math.inf
        self._num_draft_tokens = num_draft_tokens

    def num_draft_tokens(self, *, before_prefill: bool = False) -> int:
        return self._num_draft_tokens

    def free_run(self) -> int:
        return sys.maxsize  # the decision never changes

    def observe(self, outcome: RoundOutcome) -> None:
        pass

    def observe_late(self, answer: LateAnswer) -> None:
        pass
