"""How many tokens to draft next, and by which method: the contract, and the policy of a request that names both."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Protocol

from gateway.requests import METHOD_AUTO


@dataclass(frozen=True)
class RoundOutcome:
    """One round as the gateway saw it."""

    # Tokens asked of the drafter (0: it was not asked), proposed and accepted.
    num_asked: int
    num_draft_tokens: int
    num_accepted: int
    # Of the verifier's commit (messages.Timings).
    batch_sessions: int
    # What so many draft tokens of every session (draft_prices.PRICED_DRAFTS) would add to the forward.
    draft_rows_s: tuple[float, ...]
    tokens_per_s: float
    # The drafter's own time for the proposal, and what the round took beyond both services' work.
    draft_s: float
    overhead_s: float
    # What the verifier took for it, waiting for others included; 0: not told.
    verify_s: float = 0.0
    # Of the method that was asked; "" when none was.
    method: str = ""
    # The whole verifier's last round: tokens of all sessions, and seconds; 0: it tells nothing.
    round_tokens: int = 0
    round_s: float = 0.0
    # Sessions that are open at the verifier, in this forward or not; 0: not told.
    open_sessions: int = 0
    # Whether the draft may have been asked for before the round began: such rounds are of two kinds, near and far.
    may_be_ahead: bool = False
    # Whether the drafter first had to read the prompt, or what was decoded without it: that says nothing of further
    # answers.
    is_catch_up: bool = False
    # Where the verifier drafted by itself, for all sessions of the batch together: the most tokens that one of them
    # asked for, and draft_s is of all; 0: somebody else drafted, or nobody.
    draft_depth: int = 0
    # Tokens that were wanted beyond the end of the output, and so not asked for.
    num_beyond_end: int = 0


@dataclass(frozen=True)
class LateAnswer:
    """A draft that came too late for its round, held against what was committed meanwhile."""

    method: str
    num_asked: int
    num_draft_tokens: int
    num_accepted: int  # would have been
    draft_s: float
    overhead_s: float
    is_catch_up: bool = False  # as in RoundOutcome


class DraftPolicy(Protocol):
    """Contract: `num_draft_tokens` is asked before each round; 0 means decode alone for `free_run` tokens. A verifier
    that drafts by itself goes on with what was said for as many.
    before_prefill: nothing is drafted in this round, but a drafter that is wanted after it can read the prompt.

    `method` is whom to ask, and may change between rounds; "auto": whoever is there. `patience_s`: how long an answer
    is worth waiting for, in the round that was asked about last. `observe` is told of every round, `observe_late` of
    answers that nobody waited for.
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
    """Always the same method and length, as a request that names its method asks for."""

    def __init__(self, num_draft_tokens: int, method: str = METHOD_AUTO) -> None:
        self.method = method
        self.patience_s = math.inf
        self._num_draft_tokens = num_draft_tokens

    def num_draft_tokens(self, *, before_prefill: bool = False) -> int:
        return self._num_draft_tokens

    def free_run(self) -> int:
        return sys.maxsize  # nothing else will ever be decided

    def observe(self, outcome: RoundOutcome) -> None:
        pass

    def observe_late(self, answer: LateAnswer) -> None:
        pass
