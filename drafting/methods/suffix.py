"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975; vLLM's `suffix`): proposes what followed the same text before.

It searches the session's own text, prompt included, and the outputs of ended sessions with the same cache salt. Every
suffix of the text up to the trees' depth is tried, and the draft with the highest score (expected accepted tokens) is
proposed: a tree where the step asks for one, else a chain. The draft depends only on counts fixed before verification,
so it needs no distributions: the verifier treats it as point masses.

Trying every suffix, not only the longest, leaves room for the draft below a long match in a tree of bounded depth: 1.71
instead of 1.64 tokens per step (60 Python files, chains of up to 5).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from outrider.drafting.methods.guided import guided_chain
from outrider.drafting.session import DraftSession
from outrider.drafting.suffix.draft import DraftLimits, SuffixDraft, draft_from
from outrider.drafting.suffix.texts import LiveText, PastTexts
from outrider.drafting.suffix.tree import Position, SuffixTree
from outrider.engine.sampling.grammar import GrammarCompiler, GrammarState
from outrider.shared.messages import DraftMethodInfo, DraftStep, Proposal

# tokens; longest chain and deepest tree; the gateway has the same limit
MAX_DRAFT_TOKENS = 32
# nodes; largest tree; more would not fit the verifier's row budget with other sessions in the batch
MAX_TREE_NODES = 64
# tokens; most that are indexed per call of `advance`, a few milliseconds, while other sessions' drafts wait
CATCH_UP_TOKENS = 256
# tokens; slack for a spec factor times a whole number that falls short of the exact product
_ROUNDING = 1e-6


@dataclass(frozen=True)
class SuffixSettings:
    """vLLM's `suffix_decoding_*` settings; max_cached_nodes is our own: 130 bytes each, about 1.2 per token."""

    max_tree_depth: int
    max_cached_requests: int
    max_cached_nodes: int
    max_spec_factor: float
    min_token_prob: float


class SuffixMethod:
    """Implements drafting.methods.interface.DraftMethod. Deterministic given the texts it has seen, in order.

    A committed token costs O(max_tree_depth) for any text length. A chain of k tokens costs at most O(max_tree_depth *
    k): suffixes that cannot beat the best draft so far are skipped.
    """

    def __init__(self, settings: SuffixSettings) -> None:
        self.info = DraftMethodInfo(name="suffix", max_num_draft_tokens=MAX_DRAFT_TOKENS, proposes_trees=True)
        self.grammars: GrammarCompiler | None = None
        self.past = PastTexts(
            settings.max_tree_depth,
            max_num_texts=settings.max_cached_requests,
            max_num_nodes=settings.max_cached_nodes,
        )
        self._settings = settings
        self._live: dict[int, LiveText] = {}

    def open(self, session: DraftSession) -> None:
        self._live[id(session)] = LiveText(self._settings.max_tree_depth)

    def advance(self, session: DraftSession) -> bool:
        return self._catch_up(session, CATCH_UP_TOKENS) > 0

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        return [self._propose(session) for session in sessions]

    def close(self, session: DraftSession) -> None:
        """Adds the output to its salt's past texts, without the prompt."""
        if self._live.pop(id(session), None) is not None:
            spec = session.spec
            self.past.add(spec.cache_salt, spec.session_id, session.output_token_ids)

    def _catch_up(self, session: DraftSession, max_num_tokens: int) -> int:
        """Indexes up to max_num_tokens committed tokens; returns the number left. Restarts after a withdrawal."""
        live = self._live[id(session)]
        if session.take_unchanged_len("suffix") < len(live.token_ids):
            live = self._live[id(session)] = LiveText(self._settings.max_tree_depth)
        start = len(live.token_ids)
        live.extend(session.token_ids[start : start + max_num_tokens])
        return len(session.token_ids) - len(live.token_ids)

    def _propose(self, session: DraftSession) -> Proposal:
        step = session.step
        if step is not None and session.grammar is not None and step.max_tree_nodes == 0:
            return self._guided(session, session.grammar, step)
        draft = self.best_draft(session, step) if step is not None else SuffixDraft()
        return Proposal(
            base_len=session.committed_len,
            token_ids=tuple(draft.token_ids),
            method=self.info.name,
            # A tree without branches is sent as a chain: its KV rows are in order, and it is useful even when late.
            parents=() if draft.is_chain else tuple(draft.parents),
            confidence=bytes(min(255, int(share * 256)) for share in draft.shares),
        )

    def _guided(self, session: DraftSession, grammar: GrammarState, step: DraftStep) -> Proposal:
        def look_up(tail: list[int], num_tokens: int) -> list[int]:
            return self.best_draft(session, replace(step, num_draft_tokens=num_tokens), tail).token_ids

        num_tokens = min(step.num_draft_tokens, MAX_DRAFT_TOKENS)
        token_ids = guided_chain(grammar, session.output_token_ids, num_tokens, look_up)
        return Proposal(base_len=session.committed_len, token_ids=tuple(token_ids), method=self.info.name)

    def best_draft(self, session: DraftSession, step: DraftStep, tail: Sequence[int] = ()) -> SuffixDraft:
        """Returns the draft with the best score after the session's text and `tail`.

        Of equal scores its own text wins, then the longer match.
        """
        self._catch_up(session, len(session.token_ids))
        best, source = SuffixDraft(), None
        for tree, position in self._matches(session, tail):
            limits = self._limits(step, position.depth)
            if min(limits.max_nodes, limits.max_depth) <= best.score:  # each token adds at most one
                continue
            draft = draft_from(tree, position, limits)
            if draft.score > best.score:
                best, source = draft, tree
                best.match_len = position.depth
        if source is not None and best.last_position is not None:
            self.past.touch(source.text_of(best.last_position))
        return best

    def _matches(self, session: DraftSession, tail: Sequence[int]) -> Iterator[tuple[SuffixTree, Position]]:
        """Yields occurrences of the session's last tokens, longest suffix first, in its own text, then in past ones."""
        live = self._live[id(session)]
        for position in live.suffixes_with(tail) if tail else live.suffixes():
            yield live.tree, position
        last = live.token_ids + array("i", tail) if tail else live.token_ids
        for position in self.past.suffixes(session.spec.cache_salt, last):
            yield self.past.tree, position

    def _limits(self, step: DraftStep, match_len: int) -> DraftLimits:
        """Returns the step's limits, reduced to what a match of this length supports."""
        settings = self._settings
        max_depth = min(
            step.num_draft_tokens,
            MAX_DRAFT_TOKENS,
            int(match_len * settings.max_spec_factor + _ROUNDING),
            settings.max_tree_depth - match_len,
        )
        if step.max_tree_nodes > 0:
            max_nodes = min(step.max_tree_nodes, MAX_TREE_NODES)
            return DraftLimits(max_nodes, max_depth, step.max_branches, settings.min_token_prob)
        return DraftLimits(max_depth, max_depth, 1, settings.min_token_prob)
