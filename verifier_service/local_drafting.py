"""Local drafting: the drafter's methods in the verifier engine's thread, between two forwards.

On one machine the four messages of a round with a drafter service cost more than drafting itself. Here all sessions in
the next forward are drafted for in one batch, without messages (docs/log.md: d866470). The methods are a drafter's, and
their proposals are verified like a drafter's.

A method that fails ends no session: its rounds continue without drafts.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.serving.combined import CombinedMethod
from outrider.drafting.serving.versions import VersionedMethod
from outrider.drafting.session import LONG_REPORT, DraftSession
from outrider.shared.messages import DraftMethodInfo, DraftStep, LocalDrafts, Proposal
from outrider.verifier_service.hidden_states import ReadRows
from outrider.verifier_service.session import LocalDraft, VerifierSession

log = logging.getLogger(__name__)


@dataclass
class _MethodState:
    """One method's state of one session. next_row: position of the first hidden state that it has not received."""

    draft: DraftSession
    next_row: int = 0
    # True if its backlog may be longer than a proposal should wait for.
    is_behind: bool = True
    has_failed: bool = False


class _Asked(NamedTuple):
    """A session to draft for now. drafts: cut to the tokens that the round can use."""

    session: VerifierSession
    state: _MethodState
    drafts: LocalDrafts


@dataclass
class LocalDrafting:
    """Drafting in the verifier's own process. Belongs to the engine's thread.

    methods: by name, from drafting.methods.registry. read_rows: for methods that need hidden states. before_reading:
    called before a method reads a backlog, which takes longer than drafting. versions: those of the methods that have
    versions, without what was put around them.
    """

    methods: Mapping[str, DraftMethod]
    max_model_len: int
    read_rows: ReadRows
    before_reading: Callable[[], None]
    versions: Mapping[str, VersionedMethod | CombinedMethod] = field(default_factory=dict)
    # id of the VerifierSession -> method -> state
    _states: dict[int, dict[str, _MethodState]] = field(default_factory=dict)

    def cut_back(self, session: VerifierSession, committed_len: int) -> None:
        """Drops the session's output from `committed_len` on."""
        for state in self._states.get(id(session), {}).values():
            state.next_row = min(state.next_row, session.prompt_len + committed_len)
            if committed_len < state.draft.committed_len:
                state.draft.report(DraftStep(session.spec.epoch, committed_len, (), 0))

    def draft(self, sessions: Iterable[VerifierSession]) -> float:
        """Drafts for all sessions in a free run that need a draft for their next round. Returns the seconds it took."""
        started = time.perf_counter()
        asked: dict[str, list[_Asked]] = {}
        for session in sessions:
            drafts = self._wanted(session)
            state = self._state(session, drafts.method) if drafts is not None else None
            if drafts is not None and state is not None:
                asked.setdefault(drafts.method, []).append(_Asked(session, state, drafts))
        if not asked:
            return 0.0
        for name, members in asked.items():
            self._update(self.methods[name].info, members)
        self._advance_one([member.state for members in asked.values() for member in members])
        reading_s = proposing_s = time.perf_counter() - started
        for name, members in asked.items():
            ready = [member for member in members if not member.state.is_behind and not member.state.has_failed]
            if ready:
                proposing_s += self._propose(name, ready, reading_s)
        return proposing_s

    def committed(self, session: VerifierSession, num_accepted: int) -> None:
        """Tells a method with versions how many tokens of its draft for the session's last round were accepted."""
        drafted = session.local_draft
        if drafted is None or drafted.proposal is None or session.spec.predicted_token_ids:
            return  # a prediction's drafts say nothing about a method
        versions = self.versions.get(drafted.asked.method)
        if versions is not None:
            versions.observe(self._states[id(session)][drafted.asked.method].draft, num_accepted)

    def close(self, session: VerifierSession) -> None:
        """Frees what the methods hold for the session; may be called again."""
        for name, state in self._states.pop(id(session), {}).items():
            self.methods[name].close(state.draft)

    def _wanted(self, session: VerifierSession) -> LocalDrafts | None:
        """The drafts that the session's next round can use; None if it wants no local drafts or has one already."""
        drafts = session.local_drafts if session.is_ready else None
        if drafts is None or drafts.method not in self.methods:
            return None  # the gateway may have read another verifier's methods at this address
        if session.local_draft is not None or session.num_pending != 1:
            return None
        num_tokens = min(drafts.num_draft_tokens, session.draft_room(self.max_model_len))
        return dataclasses.replace(drafts, num_draft_tokens=num_tokens) if num_tokens > 0 else None

    def _state(self, session: VerifierSession, name: str) -> _MethodState | None:
        states = self._states.setdefault(id(session), {})
        if name not in states:
            spec = dataclasses.replace(session.spec, method=name, committed_token_ids=tuple(session.output_token_ids))
            grammar = session.processor.grammar
            draft = DraftSession(
                spec, list(session.token_ids), _ignore_reply, grammar=grammar.twin() if grammar else None
            )
            states[name] = _MethodState(draft)
            self._guarded(states[name], lambda: self.methods[name].open(draft))
            states[name].next_row = draft.hidden.end
        return None if states[name].has_failed else states[name]

    def _update(self, info: DraftMethodInfo, members: Sequence[_Asked]) -> None:
        """Reports the tokens committed, and the hidden states computed, since the last proposal."""
        for session, state, drafts in members:
            self._guarded(state, functools.partial(_report, session, state, drafts, info))
        if not info.hidden_layers:
            return
        if not info.takes_hidden_history:
            for session, state, _ in members:
                state.next_row = max(state.next_row, session.num_computed - 1)
        pieces = self.read_rows([(session, state.next_row) for session, state, _ in members], info.hidden_layers)
        for (_, state, _), (position, rows) in zip(members, pieces, strict=True):
            if len(rows) > 0:
                self._guarded(state, functools.partial(state.draft.hidden.add_rows, position, rows))
                state.next_row = position + len(rows)
                state.is_behind |= len(rows) > LONG_REPORT

    def _advance_one(self, states: Sequence[_MethodState]) -> None:
        """Reads one bounded piece for one session per forward: no session waits for another one's long prompt."""
        for state in states:
            if state.is_behind and not state.has_failed:
                self.before_reading()
                state.is_behind = self._advance(state)
                if state.is_behind:
                    return

    def _advance(self, state: _MethodState) -> bool:
        """Returns whether the backlog still exceeds what a proposal should wait for."""
        method, is_behind = self.methods[state.draft.spec.method], False

        def advance() -> None:
            nonlocal is_behind
            is_behind = method.advance(state.draft)

        self._guarded(state, advance)
        return is_behind

    def _propose(self, name: str, members: Sequence[_Asked], reading_s: float) -> float:
        """Drafts for the members and returns the seconds taken.

        reading_s: seconds of updating the methods, prompts included; all sessions wait for it too.
        """
        proposals: list[Proposal] = []
        started = time.perf_counter()
        try:
            proposals = self.methods[name].propose([member.state.draft for member in members])
        except Exception:
            log.exception("drafting with %s failed; its sessions continue without drafts", name)
            for member in members:
                member.state.has_failed = True
            return 0.0
        took_s = time.perf_counter() - started
        for (session, state, drafts), proposal in zip(members, proposals, strict=True):
            found = proposal if proposal.token_ids else None
            session.local_draft = LocalDraft(drafts, found, took_s + reading_s)
            missing, state.draft.missing_hidden_from = state.draft.missing_hidden_from, None
            if missing is not None:
                state.next_row = min(state.next_row, session.prompt_len + missing)
        return took_s

    def _guarded(self, state: _MethodState, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:
            log.exception("drafting with %s failed; the session continues without drafts", state.draft.spec.method)
            state.has_failed = True


def _report(session: VerifierSession, state: _MethodState, drafts: LocalDrafts, info: DraftMethodInfo) -> None:
    draft = state.draft
    base_len, num_tokens = draft.committed_len, drafts.num_draft_tokens
    new_token_ids = tuple(session.token_ids[draft.prompt_len + base_len :])
    max_tree_nodes = num_tokens if drafts.token_tree and info.proposes_trees else 0
    draft.report(DraftStep(session.spec.epoch, base_len, new_token_ids, num_tokens, max_tree_nodes=max_tree_nodes))
    state.is_behind |= len(new_token_ids) > LONG_REPORT


def _ignore_reply(reply: object) -> None:
    """Serves as DraftSession.on_reply, which is unused here: proposals are return values."""
