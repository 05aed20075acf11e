"""Drafts from the output that a request predicts (OpenAI's `prediction`), and else with another method.

A session whose output follows its predicted text is drafted from it, at no cost but the lookup; all other sessions, and
that session once it has left the text, are drafted by the method. A prediction that fails must be found again by a
longer match each time, so that a wrong one costs a few rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.drafting.methods.guided import LookUp, guided_chain
from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.session import DraftSession
from outrider.engine.sampling.grammar import GrammarCompiler, GrammarState
from outrider.shared.draft_policy.predicted_text import PredictedText
from outrider.shared.messages import DraftMethodInfo, Proposal

# tokens; longest proposal; the gateway has the same limit
_MAX_DRAFT_TOKENS = 32
# tokens; match length required after the first failed draft, and its upper bound; doubles with each further failure
_FIRST_NEEDED, _MOST_NEEDED = 2, 32
# tokens; length of the output's end that is compared to detect that some tokens were withdrawn
_TAIL = 8


@dataclass
class Follower:
    """A predicted text that follows an output of which tokens may be withdrawn."""

    predicted_token_ids: Sequence[int]
    text: PredictedText = field(init=False)
    _num_seen: int = 0
    _tail: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text = PredictedText(self.predicted_token_ids)

    def update(self, output: list[int]) -> None:
        """Follows what the output has beyond the last call."""
        if output[max(0, self._num_seen - _TAIL) : self._num_seen] != self._tail:  # withdrawn
            self.text, self._num_seen = PredictedText(self.predicted_token_ids), 0
        self.text.extend(output[self._num_seen :])
        self._num_seen, self._tail = len(output), output[-_TAIL:]

    def chain(self, output: list[int], num_tokens: int, grammar: GrammarState | None) -> list[int]:
        """Returns at most `num_tokens` tokens that are expected after the output, as far as the grammar allows them."""
        token_ids = self.text.continuation(num_tokens)
        if token_ids and grammar is not None:
            return guided_chain(grammar, output, num_tokens, _looks_up(token_ids))
        return token_ids


@dataclass
class _Followed:
    """One session's prediction, and whether drafts are taken from it.

    num_needed: tokens that must agree before they are. drafted_at: output length at the last draft from it; -1: no
    draft is open.
    """

    follower: Follower
    num_needed: int = 0
    drafted_at: int = -1
    first_drafted: int = -1

    def update(self, output: list[int]) -> None:
        if 0 <= self.drafted_at < len(output):
            has_failed = output[self.drafted_at] != self.first_drafted
            needed = min(max(_FIRST_NEEDED, 2 * self.num_needed), _MOST_NEEDED)
            self.num_needed = needed if has_failed else min(self.num_needed, _FIRST_NEEDED)
            self.drafted_at = -1
        self.follower.update(output)


class PredictedMethod:
    """Implements drafting.methods.interface.DraftMethod. Predicted drafts are point masses, fixed before the round."""

    def __init__(self, method: DraftMethod) -> None:
        self._method = method
        self._followed: dict[int, _Followed] = {}

    @property
    def info(self) -> DraftMethodInfo:
        return self._method.info

    @property
    def grammars(self) -> GrammarCompiler | None:
        return self._method.grammars

    def open(self, session: DraftSession) -> None:
        if session.spec.predicted_token_ids:
            self._followed[id(session)] = _Followed(Follower(session.spec.predicted_token_ids))
        self._method.open(session)

    def advance(self, session: DraftSession) -> bool:
        return self._method.advance(session)

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        predicted = [self._predicted(session) for session in sessions]
        others = [session for session, found in zip(sessions, predicted, strict=True) if found is None]
        rest = iter(self._method.propose(others) if others else ())
        return [next(rest) if found is None else found for found in predicted]

    def close(self, session: DraftSession) -> None:
        self._followed.pop(id(session), None)
        self._method.close(session)

    def _predicted(self, session: DraftSession) -> Proposal | None:
        followed, step = self._followed.get(id(session)), session.step
        if followed is None or step is None:
            return None
        output = session.output_token_ids
        followed.update(output)
        if followed.follower.text.followed_len < followed.num_needed:
            return None
        count = min(step.num_draft_tokens, self.info.max_num_draft_tokens or _MAX_DRAFT_TOKENS)
        token_ids = followed.follower.chain(output, count, session.grammar)
        if not token_ids:
            return None
        followed.drafted_at, followed.first_drafted = session.committed_len, token_ids[0]
        return Proposal(base_len=session.committed_len, token_ids=tuple(token_ids), method=self.info.name)


def with_predictions(methods: Mapping[str, DraftMethod]) -> dict[str, DraftMethod]:
    return {name: PredictedMethod(method) for name, method in methods.items()}


def _looks_up(token_ids: list[int]) -> LookUp:
    def look_up(tail: list[int], num_tokens: int) -> list[int]:
        """Returns the prediction after the tail, while the draft is the prediction."""
        agrees = token_ids[: len(tail)] == tail
        return token_ids[len(tail) : len(tail) + num_tokens] if agrees else []

    return look_up
