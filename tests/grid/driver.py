"""Runs sessions on one pool: propose, submit, collect, until every one of them has finished.

The engine's own thread verifies while this one drafts, so crowds mix as they do in the service. Specs and steps pass
through the wire's bytes.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.session import DraftSession
from outrider.gateway.proposals.hidden_flow import HiddenFlow
from outrider.shared import wire
from outrider.shared.messages import Commit, DraftStep, LocalDrafts, Proposal, SessionSpec, VerifyStep
from outrider.v1 import verifier_pb2
from tests.grid.pools import Pool

# What a session decodes alone in one step where it has to be idle now and then (the gateway's ALONE_RUN).
SHORT_RUN = 16
_TIMEOUT_S = 120.0


@dataclass
class Session:
    """`method` None decodes without drafts: `free_run` tokens a step. `failure` is the error that ended it."""

    spec: SessionSpec
    method: DraftMethod | None
    gamma: int
    free_run: int
    output: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached_tokens: int = 0
    finished: bool = False
    failure: str = ""
    handle: int = -1
    draft: DraftSession | None = None
    hidden: HiddenFlow | None = None
    # Whether the method is asked for trees; others are given theirs by TreeMethod.
    tree: bool = False
    # Of tokens: it is left once it has so many, whatever its limit is.
    enough: int | None = None
    # What the verifier is to draft by itself in the session's free runs.
    local: LocalDrafts | None = None


# Called between two rounds of a session that runs alone, with the number of its tokens.
Interlude = Callable[[int], None]


class Driver:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._replies: queue.SimpleQueue[tuple[Session, Commit | Exception]] = queue.SimpleQueue()

    def run(self, sessions: Sequence[Session], interlude: Interlude | None = None) -> None:
        """Returns when all have finished or failed; what they held is free by then."""
        for session in sessions:
            self._open(session)
        try:
            self._submit(sessions)
            while not all(session.finished for session in sessions):
                ready = [session for session in self._collect() if not session.finished]
                if interlude is not None:
                    for session in ready:
                        interlude(len(session.output))
                self._submit(ready)
        finally:
            for session in sessions:
                self._close(session)
            self._pool.engine.check_integrity()

    def _open(self, session: Session) -> None:
        sent = wire.open_verifier(session.spec).SerializeToString()
        spec = wire.spec_from_wire(verifier_pb2.VerifierRequest.FromString(sent).open)
        engine = self._pool.engine
        grammar = engine.compile_grammar(spec)
        session.handle = engine.open(spec, lambda reply: self._replies.put((session, reply)), grammar)
        if session.method is not None:
            session.draft = DraftSession(spec, list(spec.prompt_token_ids), lambda _reply: None)
            session.method.open(session.draft)
            session.hidden = HiddenFlow(session.method.info, len(spec.prompt_token_ids))

    def _close(self, session: Session) -> None:
        self._pool.engine.close(session.handle)
        if session.method is not None and session.draft is not None:
            session.method.close(session.draft)

    def _collect(self) -> list[Session]:
        """Takes every reply that is there, at least one; returns the sessions whose step is over."""
        done: list[Session] = []
        reply = self._replies.get(timeout=_TIMEOUT_S)
        while True:
            if self._take(*reply):
                done.append(reply[0])
            try:
                reply = self._replies.get_nowait()
            except queue.Empty:
                return done

    def _take(self, session: Session, reply: Commit | Exception) -> bool:
        if isinstance(reply, Exception):
            session.finished, session.failure = True, f"{type(reply).__name__}: {reply}"
            return True
        if reply.base_len != len(session.output):
            session.finished, session.failure = True, f"commit at {reply.base_len}, expected {len(session.output)}"
            return True
        session.output.extend(reply.token_ids)
        if session.hidden is not None:
            session.hidden.take(reply.hidden_states)
        session.num_draft_tokens += reply.num_draft_tokens
        session.num_accepted_tokens += reply.num_accepted_tokens
        session.num_cached_tokens += reply.num_cached_tokens
        is_enough = session.enough is not None and len(session.output) >= session.enough
        session.finished = reply.finish_reason is not None or is_enough
        return not reply.more

    def _submit(self, sessions: Sequence[Session]) -> None:
        """All steps are sent together, as late as the slowest draft: fewer, fuller forwards."""
        by_method: dict[int, tuple[DraftMethod, list[Session]]] = {}
        for session in sessions:
            if session.method is not None:
                by_method.setdefault(id(session.method), (session.method, []))[1].append(session)
        proposals = {
            id(session): proposal
            for method, members in by_method.values()
            for session, proposal in zip(members, _propose(method, members), strict=True)
        }
        for session in sessions:
            proposal = proposals.get(id(session))
            committed_len = len(session.output)
            hidden = session.hidden.request(committed_len) if session.hidden is not None else None
            if proposal is not None and proposal.token_ids:
                step = VerifyStep(session.spec.epoch, committed_len, proposal, hidden_states=hidden)
            else:
                step = VerifyStep(
                    session.spec.epoch,
                    committed_len,
                    max_new_tokens=session.free_run,
                    hidden_states=hidden,
                    local_drafts=session.local,
                )
            self._send(session, step)

    def _send(self, session: Session, step: VerifyStep) -> None:
        sent = wire.verify_step_to_wire(step).SerializeToString()
        received = wire.verify_step_from_wire(verifier_pb2.VerifierRequest.FromString(sent).step)
        self._pool.engine.submit(session.handle, received)


def _propose(method: DraftMethod, sessions: Sequence[Session]) -> list[Proposal]:
    """One batch of proposals, as the drafter's engine makes it."""
    drafts: list[DraftSession] = []
    for session in sessions:
        if session.draft is None or session.hidden is None:
            raise ValueError("only an open session can propose")
        known = session.draft.committed_len
        step = DraftStep(
            session.spec.epoch,
            known,
            tuple(session.output[known:]),
            session.gamma,
            hidden_states=session.hidden.hand_over(),
            max_tree_nodes=2 * session.gamma if session.tree else 0,
        )
        session.draft.report(step)
        while method.advance(session.draft):
            pass
        drafts.append(session.draft)
    proposals = method.propose(drafts)
    for session, draft in zip(sessions, drafts, strict=True):
        if session.hidden is not None:
            session.hidden.rewind(draft.missing_hidden_from)
        draft.missing_hidden_from = None
    return proposals
