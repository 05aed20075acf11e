"""The seam between the decode loop and everything behind it.

The loop knows these two interfaces and nothing of gRPC; in tests, and offline, both sides run in-process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from outrider.shared.messages import Commit, DraftStep, ProposalReply, SessionSpec, VerifyStep


class Verifier(Protocol):
    """One session at one verifier.

    Contract: `verify` first cuts the session back to `step.base_len`, so a repeated step is safe. It yields one
    commit per round; only a free run (no proposal, `max_new_tokens` > 0) yields more than one, the last without
    `more`. One step at a time: whoever leaves a free run before its end may only `close`.
    Raises VerifierLost when the verifier cannot be reached any more; then nothing but `close` may be called.
    """

    async def open(self, spec: SessionSpec) -> None: ...

    def verify(self, step: VerifyStep) -> AsyncIterator[Commit]: ...

    async def close(self) -> None: ...


class Drafter(Protocol):
    """One session at one drafter.

    Contract: `propose` reports the step's committed tokens and returns a proposal that stands on the step's
    `committed_len`; it may hold fewer tokens than asked for, or none. Cancelling `propose` is safe: the late reply
    is dropped. `advance` reports without asking and never waits for the drafter.
    Raises DrafterLost; then nothing but `close` may be called.
    """

    async def open(self, spec: SessionSpec) -> None: ...

    async def propose(self, step: DraftStep) -> ProposalReply: ...

    async def advance(self, step: DraftStep) -> None: ...

    async def close(self) -> None: ...
