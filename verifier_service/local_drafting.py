"""Drafts that the verifier makes by itself: the drafter's methods in the engine's own thread, between its forwards.

Where drafter and verifier share a machine, asking another process costs more than drafting: four messages a round, each
handled with caches that a forward has just swept, and every session's question by itself. Here all sessions that are
about to be verified are drafted for in one batch, and nothing travels. What is drafted, and what becomes of it, is the
same: these are the methods that a drafter serves, and their proposals are verified like any other.

A method that fails ends nobody's session: the rounds go on without a draft.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from drafter_service.engine import LONG_REPORT
from drafter_service.methods.interface import DraftMethod
from drafter_service.session import DraftSession
from shared.messages import DraftStep, HiddenStates, LocalDrafts, Proposal
from verifier_service.session import LocalDraft, VerifierSession

log = logging.getLogger(__name__)

# Rows of the target's hidden states of a session, of these layers, from a position on; None: there are none.
ReadRows = Callable[[VerifierSession, tuple[int, ...], int], HiddenStates | None]


@dataclass
class _Line:
    """What one method knows of one session. next_row: position of the first hidden state that it has not been given."""

    draft: DraftSession
    next_row: int = 0
    # Whether there may be more to read than a proposal should wait for.
    is_behind: bool = True
    has_failed: bool = False


@dataclass
class LocalDrafting:
    """Belongs to the engine's thread.

    methods: by name, as drafter_service.methods.registry builds them. read_rows: for those that want hidden states.
    before_reading: called when somebody's prompt is about to be read, which takes longer than drafting does.
    """

    methods: Mapping[str, DraftMethod]
    max_model_len: int
    read_rows: ReadRows
    before_reading: Callable[[], None]
    # By id of the verifier's session, then by method.
    _lines: dict[int, dict[str, _Line]] = field(default_factory=dict)

    def cut_back(self, session: VerifierSession, committed_len: int) -> None:
        """The session's output from `committed_len` on has been taken back."""
        for line in self._lines.get(id(session), {}).values():
            line.next_row = min(line.next_row, session.prompt_len + committed_len)
            if committed_len < line.draft.committed_len:
                line.draft.report(DraftStep(session.spec.epoch, committed_len, (), 0))

    def draft(self, sessions: Iterable[VerifierSession]) -> float:
        """Proposals for all whose free run asks for drafts and that have none for their next round; returns seconds."""
        asked: dict[str, list[tuple[VerifierSession, _Line]]] = {}
        may_read, reading_s = True, 0.0
        for session in sessions:
            num_tokens = self._num_wanted(session)
            if num_tokens <= 0 or session.step is None or session.step.local_drafts is None:
                continue
            drafts = session.step.local_drafts
            started = time.perf_counter()
            line = self._line(session, drafts.method)
            if line is None:
                continue
            self._guarded(line, functools.partial(self._tell, session, line, drafts, num_tokens))
            if line.is_behind and may_read and not line.has_failed:
                # One bounded piece for one session a forward, so that nobody waits for another's long prompt.
                self.before_reading()
                line.is_behind = self._advance(line)
                may_read = not line.is_behind
            reading_s += time.perf_counter() - started
            if not line.is_behind and not line.has_failed:
                asked.setdefault(drafts.method, []).append((session, line))
        return reading_s + sum(self._propose(name, members, reading_s) for name, members in asked.items())

    def close(self, session: VerifierSession) -> None:
        """Frees what the methods hold for the session; harmless when that is nothing."""
        for name, line in self._lines.pop(id(session), {}).items():
            self.methods[name].close(line.draft)

    def _num_wanted(self, session: VerifierSession) -> int:
        """Draft tokens that the session's next round can use; 0 where it is to have no draft of ours, or has one."""
        step = session.step
        if step is None or step.local_drafts is None or step.local_drafts.method not in self.methods:
            return 0  # another verifier may have stood at this address when the gateway looked
        if session.local_draft is not None or session.num_pending != 1:
            return 0
        return min(step.local_drafts.num_draft_tokens, session.draft_room(self.max_model_len))

    def _line(self, session: VerifierSession, name: str) -> _Line | None:
        lines = self._lines.setdefault(id(session), {})
        if name not in lines:
            spec = dataclasses.replace(session.spec, method=name, committed_token_ids=tuple(session.output_token_ids))
            grammar = session.processor.grammar
            draft = DraftSession(
                spec, list(session.token_ids), _nobody_answers, grammar=grammar.twin() if grammar else None
            )
            lines[name] = _Line(draft)
            self._guarded(lines[name], lambda: self.methods[name].open(draft))
        return None if lines[name].has_failed else lines[name]

    def _tell(self, session: VerifierSession, line: _Line, drafts: LocalDrafts, num_tokens: int) -> None:
        """Reports what has been committed, and the hidden states that have come, since the last proposal."""
        info, draft = self.methods[drafts.method].info, line.draft
        hidden: list[HiddenStates] = []
        if info.hidden_layers:
            if not info.takes_hidden_history:
                line.next_row = max(line.next_row, session.num_computed - 1)
            while piece := self.read_rows(session, info.hidden_layers, line.next_row):
                hidden.append(piece)
                line.next_row = session.prompt_len + piece.end
        base_len = draft.committed_len
        news = tuple(session.token_ids[draft.prompt_len + base_len :])
        is_tree = drafts.token_tree and info.proposes_trees
        draft.report(
            DraftStep(
                session.spec.epoch, base_len, news, num_tokens, tuple(hidden), max_tree_nodes=num_tokens * is_tree
            )
        )
        line.is_behind |= max(len(news), sum(piece.num_rows for piece in hidden)) > LONG_REPORT

    def _advance(self, line: _Line) -> bool:
        """Whether there is still more to read than a proposal should wait for."""
        method, is_behind = self.methods[line.draft.spec.method], False

        def advance() -> None:
            nonlocal is_behind
            is_behind = method.advance(line.draft)

        self._guarded(line, advance)
        return is_behind

    def _propose(self, name: str, members: list[tuple[VerifierSession, _Line]], reading_s: float) -> float:
        """reading_s: what it took to tell methods what is new, a newcomer's prompt included; all wait for that too."""
        proposals: list[Proposal] = []
        drafts = [line.draft for _, line in members]
        started = time.perf_counter()
        try:
            proposals = self.methods[name].propose(drafts)
        except Exception:
            log.exception("drafting by %s failed; its sessions go on without", name)
            for _, line in members:
                line.has_failed = True
            return 0.0
        took_s, depth = time.perf_counter() - started, max(_num_asked(line) for _, line in members)
        for (session, line), proposal in zip(members, proposals, strict=True):
            asked = LocalDrafts(name, _num_asked(line))
            found = proposal if proposal.token_ids else None
            session.local_draft = LocalDraft(asked, found, took_s + reading_s, depth)
            missing, line.draft.missing_hidden_from = line.draft.missing_hidden_from, None
            if missing is not None:
                line.next_row = min(line.next_row, session.prompt_len + missing)
        return took_s

    def _guarded(self, line: _Line, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:
            log.exception("drafting by %s failed; the session goes on without", line.draft.spec.method)
            line.has_failed = True


def _num_asked(line: _Line) -> int:
    return line.draft.step.num_draft_tokens if line.draft.step is not None else 0


def _nobody_answers(reply: object) -> None:
    """A DraftSession's replies go to a drafter's client; here the proposals are taken where they are made."""
