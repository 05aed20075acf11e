"""EAGLE drafts (Li et al. 2024, arXiv:2401.15077, 2406.16858; EAGLE-3: 2503.01840): a head that predicts features.

Row i of a session pairs the target's feature of position i with token i + 1 and gives the feature of position i + 1,
from which token i + 2 is predicted. Rows of committed tokens are computed once from the target's own features and stay
in the head's cache (drafting/paged/feature_rows). Rows of draft tokens use the head's own features and are dropped at
the next commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from outrider.drafting.growth.draft import ROOT, Draft
from outrider.drafting.paged.feature_rows import FeatureRows
from outrider.drafting.paged.paged_head import PagedHead
from outrider.drafting.session import DraftSession
from outrider.drafting.vocabulary.target_vocabulary import TargetVocabulary
from outrider.engine.attention.batch import SessionRows
from outrider.engine.sampling.chains import ChainStart
from outrider.engine.sampling.cpu_chains import CpuChains
from outrider.engine.sampling.laws import Row

if TYPE_CHECKING:
    from outrider.engine.sampling.device_chains import DeviceChains


class EagleNet:
    """Implements drafting.methods.net.DraftNet over an EAGLE-1 or EAGLE-3 head."""

    def __init__(
        self,
        paged_head: PagedHead,
        vocabulary: TargetVocabulary,
        *,
        prefill_chunk_size: int,
        chains: DeviceChains | CpuChains | None = None,
    ) -> None:
        """Takes the head. chains: over the same head, for `draw_chains`; None: drafts grow token by token."""
        self._paged = paged_head
        self._vocabulary = vocabulary
        self._prefill_chunk_size = prefill_chunk_size
        self._chains = chains
        self._rows_of = FeatureRows(paged_head, lookahead=1)
        self.hidden_layers = self._rows_of.hidden_layers
        # The head's own features of each session's current proposal, by position.
        self._features: dict[int, dict[int, torch.Tensor]] = {}

    def open(self, session: DraftSession) -> None:
        self._rows_of.open(session)

    def advance(self, session: DraftSession) -> bool:
        def compute(stop: int) -> None:
            features = self._fused([self._rows_of.states(session, self._rows_of.of(session).end, stop)])
            self._paged.forward([self._committed_rows(session, stop)], features)

        return self._rows_of.advance(session, self._prefill_chunk_size, compute)

    def logits(self, drafts: Sequence[Draft]) -> list[Sequence[Row]]:
        served = self._begin(drafts)
        if not served:
            return [() for _ in drafts]
        rows = [self._rows(draft) for draft in served]
        features = self._inputs(served)
        outputs = torch.split(self._paged.forward(rows, features), [len(row.token_ids) for row in rows])
        looked_at: list[torch.Tensor] = []
        for draft, output in zip(served, outputs, strict=True):
            looked_at += self._take(draft, output)
        guesses = iter(self._vocabulary.rows(self._logits(torch.stack(looked_at))))
        answers = {id(draft): [next(guesses) for _ in draft.frontier] for draft in served}
        return [answers.get(id(draft), ()) for draft in drafts]

    def draw_chains(self, drafts: Sequence[Draft]) -> None:
        """Finishes plain chains without Python between their tokens; the CPU leaves chains with many rows to `grow`."""
        if self._chains is None:
            raise ValueError("this net's drafts grow token by token")
        served = self._begin(drafts)
        if not served:
            return
        rows = [self._rows(draft) for draft in served]
        if isinstance(self._chains, CpuChains):
            taken = self._chains.taken(rows)
            self._draw_recorded(self._chains, [served[place] for place in taken], [rows[place] for place in taken])
            return
        features = self._inputs(served)
        outputs = torch.split(self._paged.forward(rows, features), [len(row.token_ids) for row in rows])
        last_features = torch.stack([output[-1] for output in outputs])
        starts = []
        for draft in served:
            self._rows_of.keep(draft.session, len(draft.session.token_ids) - 1)
            cache = self._rows_of.of(draft.session)
            starts.append(ChainStart(cache.num_rows, cache.table.block_ids, draft.chain_draws()))
        first_logits = self._vocabulary.spread(self._logits(last_features))
        for draft, chain in zip(served, self._chains.draw(first_logits, starts, last_features), strict=True):
            draft.take_chain(chain)

    def _draw_recorded(self, chains: CpuChains, served: Sequence[Draft], rows: Sequence[SessionRows]) -> None:
        if not served:
            return
        hidden, starts = [], []
        for draft in served:
            session, cache = draft.session, self._rows_of.of(draft.session)
            end = len(session.token_ids) - 1
            hidden.append(self._rows_of.states(session, cache.end, end))
            starts.append(ChainStart(end - cache.first, cache.table.block_ids, draft.chain_draws()))
        for draft, chain in zip(served, chains.draw(rows, hidden, starts), strict=True):
            self._rows_of.keep(draft.session, len(draft.session.token_ids) - 1)
            draft.take_chain(chain)

    def close(self, session: DraftSession) -> None:
        self._features.pop(id(session), None)
        self._rows_of.close(session)

    @torch.inference_mode()
    def _logits(self, features: torch.Tensor) -> torch.Tensor:
        return self._paged.head.logits(features)

    @torch.inference_mode()
    def _fused(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._rows_of.fused(states)

    def _begin(self, drafts: Sequence[Draft]) -> list[Draft]:
        return self._rows_of.begin(drafts, [draft.max_rows for draft in drafts])

    def _rows(self, draft: Draft) -> SessionRows:
        session = draft.session
        if not draft.nodes:
            return self._committed_rows(session, len(session.token_ids) - 1)
        cache = self._rows_of.of(session)
        if draft.is_chain:
            token_id = draft.nodes[-1].token_id
            return SessionRows([token_id], cache.num_rows + draft.depth - 1, cache.table.block_ids, num_logits_rows=1)
        positions = draft.rows()
        return SessionRows(
            token_ids=[draft.nodes[position].token_id for position in positions],
            context_len=cache.num_rows,
            block_ids=cache.table.block_ids,
            num_logits_rows=len(positions),
            num_chain_rows=0,
            parents=draft.parents_of(positions),
        )

    def _committed_rows(self, session: DraftSession, stop: int) -> SessionRows:
        cache = self._rows_of.of(session)
        return SessionRows(
            session.token_ids[cache.end + 1 : stop + 1],
            cache.num_rows,
            cache.table.block_ids,
            num_logits_rows=stop - cache.end,
        )

    def _inputs(self, drafts: Sequence[Draft]) -> torch.Tensor:
        """Returns the input features [T, H] of `_rows` for drafts of equal depth."""
        if not drafts[0].nodes:
            sessions = [draft.session for draft in drafts]
            starts = [self._rows_of.of(session).end for session in sessions]
            return self._fused(
                [
                    self._rows_of.states(session, start, len(session.token_ids) - 1)
                    for session, start in zip(sessions, starts, strict=True)
                ]
            )
        return torch.stack(
            [
                self._features[id(draft.session)][draft.nodes[position].parent]
                for draft in drafts
                for position in self._computed(draft)
            ]
        )

    def _take(self, draft: Draft, output: torch.Tensor) -> list[torch.Tensor]:
        """Stores the features of the rows just computed; returns those of the frontier, [H] each."""
        if not draft.nodes:
            self._rows_of.keep(draft.session, len(draft.session.token_ids) - 1)
            self._features[id(draft.session)] = {ROOT: output[-1]}
            return [output[-1]]
        positions = self._computed(draft)
        features = self._features[id(draft.session)]
        features |= dict(zip(positions, output, strict=True))
        return [features[position] for position in draft.frontier]

    def _computed(self, draft: Draft) -> list[int]:
        """Returns the nodes whose rows a forward computes; in a tree a node's ancestors are computed again."""
        return draft.frontier if draft.is_chain else draft.rows()
