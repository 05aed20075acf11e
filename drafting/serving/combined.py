"""A model's drafts, and a suffix lookup's in their place where that is surer (Arctic Inference's hybrid speculation).

A lookup is free and often right where the text repeats; a head or a draft model costs forwards and is as good as ever
where the text is new. For each session the lookup's draft is taken if it is expected to bring at least as many tokens
as the model's would; then the model does not run for that session.

Legal in every mode: which of the two drafts depends on committed tokens alone, never on a token drawn for this draft,
and a lookup's drafts are point masses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.suffix import SuffixMethod
from outrider.drafting.serving.versions import VersionedMethod
from outrider.drafting.session import DraftSession
from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.engine.sampling.prefixes import common_prefix_len
from outrider.shared.draft_policy.draft_methods import WITH_LOOKUP, with_lookup
from outrider.shared.messages import DraftMethodInfo, Proposal

# drafts; memory of what lookups and the model have brought: some dozens of answers
_MEMORY = 500.0
# drafts; weight of what is assumed before there are any: of a lookup, that all it scores comes true, of the model, that
# every second token is right. Both are measured from the first rounds on, a lookup's also where it was not taken.
_PRIOR = 4.0
_PRIOR_ACCEPTANCE = 0.5
# tokens; matches of at least as many are as sure as they get: of SmolLM2's answers in chat, what follows a match of 1,
# 2, 3, 4, 6, 8 and more tokens without exception so far comes again in 26, 42, 50, 60, 73, 90 % of all places
_LONGEST_MATCH = 8
# shares of the first token that are told apart
_SHARES = 4


class _LookedUp(NamedTuple):
    """A lookup's draft. score: accepted tokens that it promises. kind: length of the match, share of its first token;
    promises of one kind are alike, those of a grammar are (0, 0).
    """

    token_ids: tuple[int, ...]
    score: float
    kind: tuple[int, int]


class _Drafted(NamedTuple):
    """A session's newest draft. looked_up: found, taken or not; proposed: what the model proposed, if it did."""

    base_len: int
    looked_up: _LookedUp | None
    proposed: tuple[int, ...] | None


@dataclass
class _LookupRecord:
    """How much of what lookups promised came true, by kind."""

    _promised: dict[tuple[int, int], float] = field(default_factory=dict)
    _came: dict[tuple[int, int], float] = field(default_factory=dict)

    def expected(self, found: _LookedUp) -> float:
        """Returns the tokens of the draft that will be accepted."""
        promised, came = self._promised.get(found.kind, 0.0), self._came.get(found.kind, 0.0)
        return found.score * (came + _PRIOR) / (promised + _PRIOR)

    def observe(self, found: _LookedUp, num_right: int) -> None:
        keep = 1.0 - 1.0 / _MEMORY
        self._promised[found.kind] = keep * self._promised.get(found.kind, 0.0) + found.score
        self._came[found.kind] = keep * self._came.get(found.kind, 0.0) + num_right


@dataclass
class _ModelRecord:
    """How far the model's drafts were right: by position, drafts that reached it, and those accepted there."""

    _reached: list[float] = field(default_factory=list)
    _accepted: list[float] = field(default_factory=list)

    def expected(self, num_tokens: int) -> float:
        """Returns the tokens of a draft of `num_tokens` that will be accepted."""
        total, survives = 0.0, 1.0
        for position in range(num_tokens):
            known = position < len(self._reached)
            reached, accepted = (self._reached[position], self._accepted[position]) if known else (0.0, 0.0)
            survives *= (accepted + _PRIOR_ACCEPTANCE * _PRIOR) / (reached + _PRIOR)
            total += survives
        return total

    def observe(self, num_proposed: int, num_right: int) -> None:
        keep = 1.0 - 1.0 / _MEMORY
        missing = num_proposed - len(self._reached)
        self._reached += [0.0] * missing
        self._accepted += [0.0] * missing
        for position in range(min(num_proposed, num_right + 1)):
            self._reached[position] = keep * self._reached[position] + 1.0
            self._accepted[position] = keep * self._accepted[position] + (position < num_right)


class CombinedMethod:
    """Implements drafting.methods.interface.DraftMethod. All is called from one thread."""

    def __init__(self, method: DraftMethod, suffix: SuffixMethod) -> None:
        self._method, self._suffix, self._name = method, suffix, with_lookup(method.info.name)
        self._lookups, self._model = _LookupRecord(), _ModelRecord()
        self._drafted: dict[int, _Drafted] = {}

    @property
    def info(self) -> DraftMethodInfo:
        return dataclasses.replace(self._method.info, name=self._name)

    @property
    def grammars(self) -> GrammarCompiler | None:
        return self._method.grammars

    def open(self, session: DraftSession) -> None:
        self._suffix.open(session)
        self._method.open(session)

    def advance(self, session: DraftSession) -> bool:
        is_lookup_behind = self._suffix.advance(session)
        return self._method.advance(session) or is_lookup_behind

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        found = [self._look_up(session) for session in sessions]
        asked = [
            session for session, lookup in zip(sessions, found, strict=True) if not self._is_surer(lookup, session)
        ]
        proposals = dict(zip(map(id, asked), self._method.propose(asked) if asked else (), strict=True))
        return [
            self._proposal(session, lookup, proposals.get(id(session)))
            for session, lookup in zip(sessions, found, strict=True)
        ]

    def close(self, session: DraftSession) -> None:
        self._drafted.pop(id(session), None)
        self._suffix.close(session)
        self._method.close(session)

    def observe(self, session: DraftSession, num_accepted: int) -> None:
        """Tells a method with versions of a round in which it drafted for the session."""
        drafted = self._drafted.get(id(session))
        if isinstance(self._method, VersionedMethod) and drafted is not None and drafted.proposed is not None:
            self._method.observe(session, num_accepted)

    def _look_up(self, session: DraftSession) -> _LookedUp | None:
        """Returns what the lookup would draft; None: nothing, or a tree is asked for. Learns from the last draft."""
        drafted = self._drafted.pop(id(session), None)
        if drafted is not None:
            self._learn(drafted, session)
        step = session.step
        if step is None or step.max_tree_nodes:
            return None
        if session.grammar is not None:
            token_ids = self._suffix.propose([session])[0].token_ids
            return _LookedUp(token_ids, float(len(token_ids)), (0, 0)) if token_ids else None
        draft = self._suffix.best_draft(session, step)
        if not draft.token_ids:
            return None
        kind = min(draft.match_len, _LONGEST_MATCH), round(_SHARES * draft.shares[0])
        return _LookedUp(tuple(draft.token_ids), draft.score, kind)

    def _is_surer(self, lookup: _LookedUp | None, session: DraftSession) -> bool:
        if lookup is None or session.step is None:
            return False
        return self._lookups.expected(lookup) >= self._model.expected(session.step.num_draft_tokens)

    def _proposal(self, session: DraftSession, lookup: _LookedUp | None, proposed: Proposal | None) -> Proposal:
        base_len, is_chain = session.committed_len, proposed is None or not proposed.parents
        token_ids = None if proposed is None else proposed.token_ids
        if is_chain:
            self._drafted[id(session)] = _Drafted(base_len, lookup, token_ids)
        if proposed is not None:
            return dataclasses.replace(proposed, method=self._name)
        token_ids = lookup.token_ids if lookup is not None else ()
        return Proposal(base_len=base_len, token_ids=token_ids, method=self._name)

    def _learn(self, drafted: _Drafted, session: DraftSession) -> None:
        """Compares what was drafted with the tokens committed since: the lookup's draft also where it was not taken."""
        since = session.token_ids[session.prompt_len + drafted.base_len :]
        if not since:
            return  # withdrawn, or nothing came
        if drafted.looked_up is not None:
            self._lookups.observe(drafted.looked_up, common_prefix_len(drafted.looked_up.token_ids, since))
        if drafted.proposed:
            self._model.observe(len(drafted.proposed), common_prefix_len(drafted.proposed, since))


def with_lookups(methods: Mapping[str, DraftMethod]) -> dict[str, DraftMethod]:
    """Returns the methods, and each one with weights once more behind the suffix lookup, if that is one of them."""
    suffix = methods.get("suffix")
    if not isinstance(suffix, SuffixMethod):
        return dict(methods)
    combined = {
        with_lookup(name): CombinedMethod(method, suffix)
        for name, method in methods.items()
        if with_lookup(name) in WITH_LOOKUP
    }
    return {**methods, **combined}
