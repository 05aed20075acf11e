"""Drafts of one-pass block heads (DFlash, DSpark, JetSpec): all tokens of a draft from one forward of a block.

A proposal runs the head once, over the session's new context and its block. Each depth then has one output row,
whatever the tokens before it; with a Markov head the logits also depend on the token before (drafting/heads/block). So
a tree takes no further forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.drafting.growth.draft import ROOT, Draft
from outrider.drafting.paged.feature_rows import FeatureRows
from outrider.drafting.paged.paged_block import BlockChains, BlockPart, PagedBlock
from outrider.drafting.session import DraftSession
from outrider.drafting.vocabulary.target_vocabulary import TargetVocabulary
from outrider.engine.sampling.laws import Row


@dataclass
class _Proposal:
    """The outputs [N, H] of a session's current block; the Markov head's state after each position, if it keeps one."""

    outputs: torch.Tensor
    states: dict[int, torch.Tensor | None] = field(default_factory=dict)


class BlockNet:
    """Implements drafting.methods.net.DraftNet over a block head."""

    def __init__(
        self,
        paged: PagedBlock,
        vocabulary: TargetVocabulary,
        *,
        prefill_chunk_size: int,
        chains: BlockChains | None = None,
    ) -> None:
        """Takes the head. chains: over the same head, for `draw_chains`; None: drafts grow token by token."""
        self._paged, self._config = paged, paged.head.config
        self._vocabulary = vocabulary
        self._prefill_chunk_size = prefill_chunk_size
        self._chains = chains
        self._rows_of = FeatureRows(paged, lookahead=0)
        self.hidden_layers = self._rows_of.hidden_layers
        self._no_states = paged.states_like[None][:0]
        self._proposals: dict[int, _Proposal] = {}

    def open(self, session: DraftSession) -> None:
        self._rows_of.open(session)

    def advance(self, session: DraftSession) -> bool:
        return self._rows_of.advance(
            session,
            self._prefill_chunk_size,
            lambda stop: self._paged.forward([self._part(session, stop)], num_rows=0),
        )

    def logits(self, drafts: Sequence[Draft]) -> list[Sequence[Row]]:
        served = self._begin(drafts)
        self._run([draft for draft in served if not draft.nodes])
        if not served:
            return [() for _ in drafts]
        outputs, previous_ids, states = [], [], []
        for draft in served:
            proposal = self._proposals[id(draft.session)]
            row = proposal.outputs[draft.depth + self._config.num_silent_rows]
            for position in draft.frontier:
                is_root = position == ROOT
                outputs.append(row)
                previous_ids.append(draft.session.token_ids[-1] if is_root else draft.nodes[position].token_id)
                states.append(None if is_root else proposal.states[draft.nodes[position].parent])
        logits, states_after = self._paged.logits(torch.stack(outputs), previous_ids, states)
        rows, after = iter(self._vocabulary.rows(logits)), iter(states_after)
        answers: dict[int, Sequence[Row]] = {}
        for draft in served:
            self._proposals[id(draft.session)].states |= {position: next(after) for position in draft.frontier}
            answers[id(draft)] = [next(rows) for _ in draft.frontier]
        return [answers.get(id(draft), ()) for draft in drafts]

    def draw_chains(self, drafts: Sequence[Draft]) -> None:
        """Finishes plain chains in one recorded program each; leaves those with many rows to `grow`."""
        if self._chains is None:
            raise ValueError("this net's drafts grow token by token")
        by_len: dict[int, list[Draft]] = {}
        for draft in self._begin(drafts):
            by_len.setdefault(min(draft.max_nodes, draft.max_depth), []).append(draft)
        for num_tokens, served in by_len.items():
            parts = [self._part(draft.session, len(draft.session.token_ids) - 1) for draft in served]
            if not self._chains.takes(parts, num_tokens):
                continue
            chains = self._chains.draw(parts, [draft.chain_draws() for draft in served])
            for draft, chain in zip(served, chains, strict=True):
                self._rows_of.keep(draft.session, len(draft.session.token_ids) - 1)
                draft.take_chain(chain)

    def close(self, session: DraftSession) -> None:
        self._proposals.pop(id(session), None)
        self._rows_of.close(session)

    def _begin(self, drafts: Sequence[Draft]) -> list[Draft]:
        return self._rows_of.begin(drafts, [self._config.num_block_rows(draft.max_depth) for draft in drafts])

    def _run(self, drafts: Sequence[Draft]) -> None:
        """Runs the blocks of new proposals, those of one size together."""
        by_size: dict[int, list[Draft]] = {}
        for draft in drafts:
            by_size.setdefault(self._config.num_block_rows(draft.max_depth), []).append(draft)
        for num_rows, group in by_size.items():
            parts = [self._part(draft.session, len(draft.session.token_ids) - 1) for draft in group]
            for draft, outputs in zip(group, self._paged.forward(parts, num_rows), strict=True):
                self._rows_of.keep(draft.session, len(draft.session.token_ids) - 1)
                self._proposals[id(draft.session)] = _Proposal(outputs)

    def _part(self, session: DraftSession, stop: int) -> BlockPart:
        cache = self._rows_of.of(session)
        # Of a proposal that is asked for again nothing is new, and its states are forgotten.
        states = self._rows_of.states(session, cache.end, stop) if stop > cache.end else self._no_states
        return BlockPart(cache.table.block_ids, cache.num_rows, states, session.token_ids[-1])
