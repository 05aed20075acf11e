"""EAGLE drafts (Li et al. 2024, arXiv:2401.15077, 2406.16858; EAGLE-3: 2503.01840): a head that predicts features.

Row i of a session pairs the target's feature of position i with token i + 1 and gives the feature of position i + 1,
from which token i + 2 is predicted. Rows of committed tokens are computed once from the target's own features and stay
in the head's cache. Rows of draft tokens use the head's own features and are dropped at the next commit.

Sessions with the same prompt prefix share its rows: a row depends only on the tokens up to the one after it. Rows built
without some of the features are not shared.

Missing features (a cached prefix computed without them) shorten the head's context; they are not an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from outrider.drafting.growth.draft import ROOT, Draft
from outrider.drafting.methods.paged_head import PagedHead
from outrider.drafting.session import DraftSession
from outrider.drafting.vocabulary.target_vocabulary import TargetVocabulary
from outrider.engine.attention.batch import SessionRows
from outrider.engine.attention.block_manager import BlockTable, OutOfBlocks
from outrider.engine.sampling.chains import ChainStart
from outrider.engine.sampling.cpu_chains import CpuChains
from outrider.engine.sampling.laws import Row

if TYPE_CHECKING:
    from outrider.engine.sampling.device_chains import DeviceChains

# rows; largest backlog that a proposal catches up with; more goes through `advance`, so that a long prompt does not
# delay other sessions' drafts
CATCH_UP_ROWS = 64


@dataclass
class _State:
    """One session's rows: positions [first, end) are cached. features: the head's own, of the current proposal."""

    table: BlockTable
    first: int = 0
    end: int = 0
    features: dict[int, torch.Tensor] = field(default_factory=dict)


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
        # A head for a shallow target may read one layer twice (4-layer targets: 2, 2, 1); the layer is sent once.
        layers = paged_head.head.feature_layers
        self.hidden_layers = tuple(dict.fromkeys(layers))
        self._layer_indices = [self.hidden_layers.index(layer) for layer in layers]
        self._states: dict[int, _State] = {}

    def open(self, session: DraftSession) -> None:
        session.take_unchanged_len()
        salt = f"{session.spec.cache_salt}/{session.token_ids[0]}"  # row 0 also depends on the first token
        table, num_cached = self._paged.blocks.open(session.token_ids[1:], salt)
        self._states[id(session)] = _State(table, end=num_cached)
        session.hidden.begin_at(num_cached)

    def advance(self, session: DraftSession) -> bool:
        state = self._states[id(session)]
        end = self._align(session, state)
        if end - state.end <= CATCH_UP_ROWS:
            return False
        stop = min(state.end + self._prefill_chunk_size, end - 1)
        if not self._make_room(state, stop - state.first, spared=[state]):
            return False
        features = self._fused([session.hidden.rows(state.end, stop)])
        self._paged.forward([self._committed_rows(session, state, stop)], features)
        self._keep(session, state, stop)
        return end - state.end > CATCH_UP_ROWS

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
            state = self._states[id(draft.session)]
            self._keep(draft.session, state, len(draft.session.token_ids) - 1)
            starts.append(ChainStart(state.end - state.first, state.table.block_ids, draft.chain_draws()))
        first_logits = self._vocabulary.spread(self._logits(last_features))
        for draft, chain in zip(served, self._chains.draw(first_logits, starts, last_features), strict=True):
            draft.take_chain(chain)

    def _draw_recorded(self, chains: CpuChains, served: Sequence[Draft], rows: Sequence[SessionRows]) -> None:
        if not served:
            return
        hidden, starts = [], []
        for draft in served:
            session, state = draft.session, self._states[id(draft.session)]
            end = len(session.token_ids) - 1
            hidden.append(self._in_order(session.hidden.rows(state.end, end)))
            starts.append(ChainStart(end - state.first, state.table.block_ids, draft.chain_draws()))
        for draft, chain in zip(served, chains.draw(rows, hidden, starts), strict=True):
            self._keep(draft.session, self._states[id(draft.session)], len(draft.session.token_ids) - 1)
            draft.take_chain(chain)

    def close(self, session: DraftSession) -> None:
        state = self._states.pop(id(session), None)
        if state is not None:
            self._share(session, state, min(state.end, session.take_unchanged_len() - 1))
            self._paged.blocks.close(state.table)

    @torch.inference_mode()
    def _logits(self, features: torch.Tensor) -> torch.Tensor:
        return self._paged.head.logits(features)

    @torch.inference_mode()
    def _fused(self, hidden_rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the features [T, H] from the target's hidden states [., layers * width] of all sessions, in order."""
        rows = torch.cat([part.to(self._paged.device, self._paged.dtype) for part in hidden_rows])
        return self._paged.head.fuse(self._in_order(rows))

    def _in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """Arranges hidden states [T, layers * width] of the layers sent in the order in which the head reads them."""
        if len(self._layer_indices) == len(self.hidden_layers):
            return rows
        by_layer = rows.view(len(rows), len(self.hidden_layers), -1)
        return by_layer[:, self._layer_indices].reshape(len(rows), -1)

    def _begin(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Stops the drafts whose features are missing or for which no room can be made; returns the others."""
        states = [self._states[id(draft.session)] for draft in drafts]
        for draft, state in zip(drafts, states, strict=True):
            if draft.nodes:
                continue
            end = self._align(draft.session, state)
            if end < len(draft.session.token_ids) - 1 or end <= state.end:
                draft.session.missing_hidden_from = state.end - draft.session.prompt_len
                draft.stop()
            elif not self._make_room(state, end - state.first + draft.max_rows, spared=states):
                draft.stop()
        return [draft for draft in drafts if draft.frontier]

    def _align(self, session: DraftSession, state: _State) -> int:
        """Truncates the cache to the rows still valid; returns the position after the last row that can be computed.

        Row i is valid as long as token i + 1 is. The last row is recomputed even if it was cached: a proposal starts
        from its output feature.
        """
        end = min(session.hidden.end, len(session.token_ids) - 1)
        kept = min(state.end, session.take_unchanged_len() - 1, len(session.token_ids) - 2)
        if session.hidden.first > state.end or kept < state.first:
            state.first = state.end = session.hidden.first
            self._paged.blocks.truncate(state.table, 0)
            return max(end, state.first)
        state.end = max(state.first, kept)
        self._paged.blocks.truncate(state.table, state.end - state.first)
        return end

    def _rows(self, draft: Draft) -> SessionRows:
        session, state = draft.session, self._states[id(draft.session)]
        if not draft.nodes:
            return self._committed_rows(session, state, len(session.token_ids) - 1)
        num_committed = state.end - state.first
        if draft.is_chain:
            token_id = draft.nodes[-1].token_id
            return SessionRows([token_id], num_committed + draft.depth - 1, state.table.block_ids, num_logits_rows=1)
        positions = draft.rows()
        return SessionRows(
            token_ids=[draft.nodes[position].token_id for position in positions],
            context_len=num_committed,
            block_ids=state.table.block_ids,
            num_logits_rows=len(positions),
            num_chain_rows=0,
            parents=draft.parents_of(positions),
        )

    def _committed_rows(self, session: DraftSession, state: _State, stop: int) -> SessionRows:
        num_rows = stop - state.end
        return SessionRows(
            session.token_ids[state.end + 1 : stop + 1],
            state.end - state.first,
            state.table.block_ids,
            num_logits_rows=num_rows,
        )

    def _inputs(self, drafts: Sequence[Draft]) -> torch.Tensor:
        """Returns the input features [T, H] of `_rows` for drafts of equal depth."""
        states = [self._states[id(draft.session)] for draft in drafts]
        if not drafts[0].nodes:
            ends = [len(draft.session.token_ids) - 1 for draft in drafts]
            pairs = zip(drafts, states, ends, strict=True)
            return self._fused([draft.session.hidden.rows(state.end, end) for draft, state, end in pairs])
        return torch.stack(
            [
                state.features[draft.nodes[position].parent]
                for draft, state in zip(drafts, states, strict=True)
                for position in self._computed(draft)
            ]
        )

    def _take(self, draft: Draft, output: torch.Tensor) -> list[torch.Tensor]:
        """Stores the features of the rows just computed; returns those of the frontier, [H] each."""
        state = self._states[id(draft.session)]
        if not draft.nodes:
            self._keep(draft.session, state, len(draft.session.token_ids) - 1)
            state.features = {ROOT: output[-1]}
            return [output[-1]]
        positions = self._computed(draft)
        state.features |= dict(zip(positions, output, strict=True))
        return [state.features[position] for position in draft.frontier]

    def _computed(self, draft: Draft) -> list[int]:
        """Returns the nodes whose rows a forward computes; in a tree a node's ancestors are computed again."""
        return draft.frontier if draft.is_chain else draft.rows()

    def _keep(self, session: DraftSession, state: _State, end: int) -> None:
        state.end = end
        session.hidden.forget_before(end - 1)
        # Only the prompt's rows are shared, not the output's: shared rows cannot be truncated one by one.
        self._share(session, state, min(end, session.prompt_len - 1))

    def _share(self, session: DraftSession, state: _State, end: int) -> None:
        """Lets later sessions reuse the rows of positions [0, end)."""
        if state.first == 0:
            self._paged.blocks.register(state.table, session.token_ids[1:], end)

    def _make_room(self, state: _State, num_rows: int, *, spared: Sequence[_State]) -> bool:
        """Makes room, if needed by evicting the rows of sessions not `spared`; those restart from later features."""
        while True:
            try:
                self._paged.blocks.grow(state.table, num_rows)
                return True
            except OutOfBlocks:
                kept = {id(other) for other in spared}
                victim = next(
                    (other for other in self._states.values() if id(other) not in kept and other.table.block_ids), None
                )
                if victim is None:
                    return False
                self._paged.blocks.truncate(victim.table, 0)
                victim.first = victim.end
