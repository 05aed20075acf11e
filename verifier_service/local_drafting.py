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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from drafter_service.engine import LONG_REPORT
from drafter_service.methods.interface import DraftMethod
from drafter_service.session import DraftSession
from shared.messages import DraftMethodInfo, DraftStep, LocalDrafts, Proposal
from verifier_service.session import LocalDraft, VerifierSession

log = logging.getLogger(__name__)

# The target's hidden states of sessions, of these layers, from a position of each on (hidden_states.read_rows).
ReadRows = Callable[[Sequence[tuple[VerifierSession, int]], tuple[int, ...]], list[tuple[int, torch.Tensor]]]


@dataclass
class _Line:
    """What one method knows of one session. next_row: position of the first hidden state that it has not been given."""

    draft: DraftSession
    next_row: int = 0
    # Whether there may be more to read than a proposal should wait for.
    is_behind: bool = True
    has_failed: bool = False


class _Asked(NamedTuple):
    """Whom a method drafts for now; drafts: no more tokens than the round can use."""

    session: VerifierSession
    line: _Line
    drafts: LocalDrafts


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
        started = time.perf_counter()
        asked: dict[str, list[_Asked]] = {}
        for session in sessions:
            drafts = self._wanted(session)
            line = self._line(session, drafts.method) if drafts is not None else None
            if drafts is not None and line is not None:
                asked.setdefault(drafts.method, []).append(_Asked(session, line, drafts))
        if not asked:
            return 0.0
        for name, members in asked.items():
            self._tell(self.methods[name].info, members)
        self._advance_one([member.line for members in asked.values() for member in members])
        reading_s = proposing_s = time.perf_counter() - started
        for name, members in asked.items():
            ready = [member for member in members if not member.line.is_behind and not member.line.has_failed]
            if ready:
                proposing_s += self._propose(name, ready, reading_s)
        return proposing_s

    def close(self, session: VerifierSession) -> None:
        """Frees what the methods hold for the session; harmless when that is nothing."""
        for name, line in self._lines.pop(id(session), {}).items():
            self.methods[name].close(line.draft)

    def _wanted(self, session: VerifierSession) -> LocalDrafts | None:
        """What the session's next round can use; None where it is to have no draft of ours, or has one."""
        drafts = session.step.local_drafts if session.step is not None else None
        if drafts is None or drafts.method not in self.methods:
            return None  # another verifier may have stood at this address when the gateway looked
        if session.local_draft is not None or session.num_pending != 1:
            return None
        num_tokens = min(drafts.num_draft_tokens, session.draft_room(self.max_model_len))
        return dataclasses.replace(drafts, num_draft_tokens=num_tokens) if num_tokens > 0 else None

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
            lines[name].next_row = draft.hidden.end
        return None if lines[name].has_failed else lines[name]

    def _tell(self, info: DraftMethodInfo, members: Sequence[_Asked]) -> None:
        """Reports what has been committed, and the hidden states that have come, since the last proposal."""
        for session, line, drafts in members:
            self._guarded(line, functools.partial(_report, session, line, drafts, info))
        if not info.hidden_layers:
            return
        if not info.takes_hidden_history:
            for session, line, _ in members:
                line.next_row = max(line.next_row, session.num_computed - 1)
        pieces = self.read_rows([(session, line.next_row) for session, line, _ in members], info.hidden_layers)
        for (_, line, _), (position, rows) in zip(members, pieces, strict=True):
            if len(rows) > 0:
                self._guarded(line, functools.partial(line.draft.hidden.add_rows, position, rows))
                line.next_row = position + len(rows)
                line.is_behind |= len(rows) > LONG_REPORT

    def _advance_one(self, lines: Sequence[_Line]) -> None:
        """One bounded piece for one session a forward, so that nobody waits for another's long prompt."""
        for line in lines:
            if line.is_behind and not line.has_failed:
                self.before_reading()
                line.is_behind = self._advance(line)
                if line.is_behind:
                    return

    def _advance(self, line: _Line) -> bool:
        """Whether there is still more to read than a proposal should wait for."""
        method, is_behind = self.methods[line.draft.spec.method], False

        def advance() -> None:
            nonlocal is_behind
            is_behind = method.advance(line.draft)

        self._guarded(line, advance)
        return is_behind

    def _propose(self, name: str, members: Sequence[_Asked], reading_s: float) -> float:
        """reading_s: what it took to tell methods what is new, a newcomer's prompt included; all wait for that too."""
        proposals: list[Proposal] = []
        started = time.perf_counter()
        try:
            proposals = self.methods[name].propose([member.line.draft for member in members])
        except Exception:
            log.exception("drafting by %s failed; its sessions go on without", name)
            for member in members:
                member.line.has_failed = True
            return 0.0
        took_s, depth = time.perf_counter() - started, max(member.drafts.num_draft_tokens for member in members)
        for (session, line, drafts), proposal in zip(members, proposals, strict=True):
            found = proposal if proposal.token_ids else None
            session.local_draft = LocalDraft(drafts, found, took_s + reading_s, depth)
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


def _report(session: VerifierSession, line: _Line, drafts: LocalDrafts, info: DraftMethodInfo) -> None:
    draft = line.draft
    base_len, num_tokens = draft.committed_len, drafts.num_draft_tokens
    news = tuple(session.token_ids[draft.prompt_len + base_len :])
    max_tree_nodes = num_tokens if drafts.token_tree and info.proposes_trees else 0
    draft.report(DraftStep(session.spec.epoch, base_len, news, num_tokens, max_tree_nodes=max_tree_nodes))
    line.is_behind |= len(news) > LONG_REPORT


def _nobody_answers(reply: object) -> None:
    """A DraftSession's replies go to a drafter's client; here the proposals are taken where they are made."""
