"""Drafts with a small language model (Leviathan et al. 2023).

Each session has its own paged KV cache. A chain's draft tokens stay in it until the next commit, which truncates it to
the confirmed ones. A tree's nodes are recomputed at each depth in one forward: at a draft model's size the extra rows
cost next to nothing, and they are not cached.

A draft model with another vocabulary than the target's reads and caches its own ids (vocabulary/mapping.py); sessions
and proposals use the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from outrider.drafting.growth.draft import Draft
from outrider.drafting.methods.growing import GrowingMethod
from outrider.drafting.session import DraftSession
from outrider.drafting.vocabulary.mapping import DraftIds, VocabularyMap
from outrider.engine.attention.block_manager import BlockManager, BlockTable, OutOfBlocks
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.batch import SessionRows, build_batch
from outrider.engine.run.runner import ModelRunner
from outrider.engine.sampling.chains import ChainStart
from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.engine.sampling.laws import Row
from outrider.engine.sampling.prefixes import common_prefix_len
from outrider.shared.messages import DraftMethodInfo

if TYPE_CHECKING:
    from outrider.engine.sampling.device_chains import DeviceChains

MAX_DRAFT_TOKENS = 16
# tokens; a larger backlog goes through `advance`, so that a long prompt does not delay other sessions' drafts
CATCH_UP_ROWS = 64
_FEW_ROWS = 4


@dataclass
class _State:
    """In draft ids: the committed tokens, and the tokens whose KV is cached, a chain's included."""

    table: BlockTable
    committed: DraftIds
    cached_ids: list[int] = field(default_factory=list)


def draft_model_method(net: DraftModelNet, model_name: str) -> GrowingMethod:
    """The method over a loaded draft model; its info and its proposals are in target ids."""
    loaded, target = net.loaded, net.vocabulary.target if net.vocabulary else None
    spoken = target or loaded
    info = DraftMethodInfo(
        name="draft_model",
        model=model_name,
        max_num_draft_tokens=MAX_DRAFT_TOKENS,
        proposes_trees=True,
        # A limit in draft tokens means nothing to others; the net enforces it.
        max_model_len=0 if target else loaded.max_model_len,
        vocab_size=spoken.vocab_size,
    )
    grammars = GrammarCompiler(spoken.path, spoken.vocab_size, spoken.eos_token_ids)
    draw_chains = net.draw_chains if net.chains is not None else None
    return GrowingMethod(net, info, eos_token_ids=spoken.eos_token_ids, grammars=grammars, draw_chains=draw_chains)


class DraftModelNet:
    """drafting.methods.net.DraftNet over an HF causal language model."""

    def __init__(
        self,
        runner: ModelRunner,
        blocks: BlockManager,
        *,
        prefill_chunk_size: int,
        vocabulary: VocabularyMap | None = None,
        chains: DeviceChains | None = None,
    ) -> None:
        """vocabulary: None when the model's token ids are the target's. chains: over the same runner, for
        `draw_chains`; None, or another vocabulary: all logits go to the host.
        """
        self.vocabulary = vocabulary
        self.chains = chains if vocabulary is None else None
        self._runner = runner
        self._blocks = blocks
        self._prefill_chunk_size = prefill_chunk_size
        self._states: dict[int, _State] = {}

    @property
    def loaded(self) -> LoadedModel:
        return self._runner.loaded

    def open(self, session: DraftSession) -> None:
        committed = DraftIds(self.vocabulary)
        committed.follow(session)
        table, num_cached = self._blocks.open(committed.ids, session.spec.cache_salt)
        self._states[id(session)] = _State(table, committed, committed.ids[:num_cached])

    def advance(self, session: DraftSession) -> bool:
        state = self._states[id(session)]
        self._cut_back(session, state)
        ids, start = state.committed.ids, len(state.cached_ids)
        if len(ids) > self._runner.loaded.max_model_len or len(ids) - start <= CATCH_UP_ROWS:
            return False
        chunk = ids[start : min(start + self._prefill_chunk_size, len(ids) - 1)]
        if not self._grow(state, start + len(chunk), spared=[state]):
            return False
        rows = SessionRows(chunk, start, state.table.block_ids, num_logits_rows=0)
        self._runner.forward(build_batch([rows], self._blocks.block_size))
        state.cached_ids.extend(chunk)
        self._blocks.register(state.table, ids, len(state.cached_ids))
        return len(ids) - len(state.cached_ids) > CATCH_UP_ROWS

    def logits(self, drafts: Sequence[Draft]) -> list[Sequence[Row]]:
        served = self._make_room(drafts)
        if not served:
            return [() for _ in drafts]
        rows = [self._rows(draft) for draft in served]
        batch = build_batch(rows, self._blocks.block_size)
        logits = self._rows_of_target(self._runner.forward(batch).logits)
        answers: dict[int, Sequence[Row]] = {}
        first_row = 0
        for draft, draft_rows in zip(served, rows, strict=True):
            last = logits[first_row : first_row + draft_rows.num_logits_rows]
            answers[id(draft)] = last[-1:] if draft.is_chain or not draft.nodes else draft.frontier_of(last)
            first_row += draft_rows.num_logits_rows
            self._keep(draft, draft_rows)
        return [answers.get(id(draft), ()) for draft in drafts]

    def draw_chains(self, drafts: Sequence[Draft]) -> None:
        """Finishes plain chains on the device, without copying their logits to the host."""
        if self.chains is None:
            raise ValueError("this net's logits go to the host")
        served = self._make_room(drafts)
        if not served:
            return
        rows = [self._rows(draft) for draft in served]
        logits = self._runner.forward(build_batch(rows, self._blocks.block_size)).logits
        starts, last_rows = [], np.cumsum([draft_rows.num_logits_rows for draft_rows in rows]) - 1
        for draft, draft_rows in zip(served, rows, strict=True):
            self._keep(draft, draft_rows)
            state = self._states[id(draft.session)]
            starts.append(ChainStart(len(state.cached_ids), state.table.block_ids, draft.chain_draws()))
        first_logits = logits[torch.from_numpy(last_rows).to(logits.device)]
        for draft, start, chain in zip(served, starts, self.chains.draw(first_logits, starts), strict=True):
            draft.take_chain(chain)
            computed = [drawn.token_id for drawn in chain[: start.draws.num_tokens - 1]]
            self._states[id(draft.session)].cached_ids.extend(computed)

    def close(self, session: DraftSession) -> None:
        state = self._states.pop(id(session), None)
        if state is not None:
            self._blocks.close(state.table)

    def _make_room(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Stops the drafts for which no room can be made, and returns the others."""
        states = [self._states[id(draft.session)] for draft in drafts]
        for draft, state in zip(drafts, states, strict=True):
            if draft.nodes:
                # Where no shared token is allowed, an end token is proposed, which the draft model may not have.
                if len(self._own_ids(draft, draft.frontier)) < len(draft.frontier):
                    draft.stop()
                continue
            self._cut_back(draft.session, state)
            num_ids = len(state.committed.ids)
            draft.max_depth = min(draft.max_depth, self._runner.loaded.max_model_len - num_ids)
            if num_ids == 0 or draft.max_depth <= 0 or not self._grow(state, num_ids + draft.max_rows, spared=states):
                draft.stop()
        return [draft for draft in drafts if draft.frontier]

    def _rows(self, draft: Draft) -> SessionRows:
        state = self._states[id(draft.session)]
        committed, start = state.committed.ids, len(state.cached_ids)
        if not draft.nodes:
            num_rows = len(committed) - start
            # One row after a rejection, two otherwise.
            # CUDA graphs replay only batches of which the logits of every row are wanted.
            num_logits_rows = num_rows if num_rows <= _FEW_ROWS else 1
            return SessionRows(committed[start:], start, state.table.block_ids, num_logits_rows)
        if draft.is_chain:
            return SessionRows(self._own_ids(draft, [len(draft.nodes) - 1]), start, state.table.block_ids, 1)
        positions = draft.rows()
        return SessionRows(
            token_ids=self._own_ids(draft, positions),
            context_len=len(committed),
            block_ids=state.table.block_ids,
            num_logits_rows=len(positions),
            num_chain_rows=0,
            parents=draft.parents_of(positions),
        )

    def _keep(self, draft: Draft, rows: SessionRows) -> None:
        state = self._states[id(draft.session)]
        if not draft.nodes or draft.is_chain:
            state.cached_ids.extend(rows.token_ids)
        if not draft.nodes:
            self._blocks.register(state.table, state.committed.ids, len(state.committed.ids))

    def _own_ids(self, draft: Draft, positions: Sequence[int]) -> list[int]:
        """The draft model's ids of nodes; without those that it does not have."""
        token_ids = [draft.nodes[position].token_id for position in positions]
        if self.vocabulary is None:
            return token_ids
        twins = [self.vocabulary.twin(token_id) for token_id in token_ids]
        return [token_id for token_id in twins if token_id is not None]

    def _rows_of_target(self, logits: torch.Tensor) -> Sequence[Row]:
        """logits [N, draft vocabulary] as N rows over the target's, which outlive the next forward."""
        return list(logits.float().cpu().numpy().copy()) if self.vocabulary is None else self.vocabulary.rows(logits)

    def _cut_back(self, session: DraftSession, state: _State) -> None:
        """Truncates the cache to the committed tokens it agrees with; the last of them is always recomputed."""
        unchanged_len = state.committed.follow(session)
        ids = state.committed.ids
        agreed = min(unchanged_len, len(state.cached_ids))
        agreed += common_prefix_len(state.cached_ids[agreed:], ids[agreed:])
        agreed = self._blocks.truncate(state.table, min(agreed, max(0, len(ids) - 1)))
        del state.cached_ids[agreed:]

    def _grow(self, state: _State, num_positions: int, *, spared: Sequence[_State]) -> bool:
        """Makes room, if needed by evicting the caches of sessions not `spared`, which are recomputed."""
        while True:
            try:
                self._blocks.grow(state.table, num_positions)
                return True
            except OutOfBlocks:
                kept = {id(other) for other in spared}
                victim = next(
                    (other for other in self._states.values() if id(other) not in kept and other.table.block_ids), None
                )
                if victim is None:
                    return False
                self._blocks.truncate(victim.table, 0)
                victim.cached_ids.clear()
