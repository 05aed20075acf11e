"""The values that a round of drafting consists of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outrider.gateway.metrics import DraftCame
from outrider.gateway.proposals.run_ahead import AheadTrials
from outrider.shared.messages import (
    Commit,
    DrafterOffer,
    DraftMethodInfo,
    LastDraft,
    LocalDrafts,
    NextDraft,
    Proposal,
    Timings,
    VerifierInfo,
)


@dataclass(frozen=True)
class DraftPlan:
    """The drafting that a request wants.

    method: a named one drafts exactly num_draft_tokens a round; METHOD_AUTO: the verifier decides, up to that number.
    offers: what drafters serve now. max_round_us: bounds a round with drafts; 0: no bound.
    """

    method: str
    num_draft_tokens: int
    token_tree: bool = False
    max_round_us: int = 0
    offers: Callable[[], tuple[DrafterOffer, ...]] = tuple


@dataclass
class DraftHint:
    """The sessions' common knowledge of drafting at one verifier.

    next_draft: what the verifier last wanted from a drafter. A new session's drafter is opened with it, so that it
    reads the prompt while the verifier does. trials: of asking ahead.
    """

    next_draft: NextDraft | None = None
    trials: AheadTrials = field(default_factory=AheadTrials)


@dataclass(frozen=True)
class LocalMethods:
    """Methods that the verifier at `address` serves, by name."""

    address: str
    methods: Mapping[str, DraftMethodInfo]

    @classmethod
    def of(cls, address: str, info: VerifierInfo | None) -> LocalMethods:
        return cls(address, {method.name: method for method in (info.local_methods if info is not None else ())})


NO_LOCAL_METHODS = LocalMethods("", {})


@dataclass(frozen=True)
class Ask:
    """A session's request to a drafter for its next round. method: METHOD_AUTO: any. patience_s: seconds; how long a
    draft is worth waiting for.
    """

    committed_len: int
    method: str = ""
    num_draft_tokens: int = 0
    patience_s: float = math.inf


@dataclass(frozen=True)
class Answer:
    """The outcome of an Ask, and how long it took."""

    ask: Ask
    came: DraftCame = DraftCame.NOT_WANTED
    # At most one of the two: a draft to verify, or the local drafts that the verifier is to make.
    proposal: Proposal | None = None
    local_drafts: LocalDrafts | None = None
    # The method and drafter that were asked; "" if none was, and offline, where drafters have no address.
    method: str = ""
    drafter: str = ""
    # Seconds that the round waited for the draft, and the drafter's own times.
    wait_s: float = 0.0
    timings: Timings = field(default_factory=Timings)
    # gave_up_s: seconds of waiting before giving up, not a cost of the round that follows; 0: the draft came.
    # refused: why no drafter was asked; "": one was.
    gave_up_s: float = 0.0
    refused: str = ""
    # may_be_ahead: this draft may have been requested before its round began. looks_ahead: the next one may be.
    may_be_ahead: bool = False
    looks_ahead: bool = False
    # Tokens that the verifier may commit before the session asks again; 0: only what it makes of the proposal.
    max_new_tokens: int = 0

    def last_draft(self) -> LastDraft:
        """Returns the draft's outcome, as reported to the verifier that wanted it."""
        waited_us = round(1e6 * (self.wait_s + self.gave_up_s))
        return LastDraft(waited_us, self.timings.total_us, self.gave_up_s > 0.0, self.refused)

    def for_commit(self, commit: Commit) -> Answer:
        """This answer as it concerns the round of one commit: only the first round of a run waited for it."""
        if commit.base_len == self.ask.committed_len:
            return self
        return dataclasses.replace(self, proposal=None, method="", drafter="", wait_s=0.0, timings=Timings())
