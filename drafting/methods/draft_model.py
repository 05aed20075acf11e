"""Drafts with a small language model (Leviathan et al. 2023).

Each session has its own paged KV cache. A chain's draft tokens stay in it until the next commit, which truncates it to
the confirmed ones. A tree's nodes are recomputed at each depth in one forward: at a draft model's size the extra rows
cost next to nothing, and they are not cached. A hybrid's recurrent states (draft_states) go along with the cache; its
trees begin with the last committed token, since a forward of theirs needs one.

A draft model with another vocabulary than the target's reads and caches its own ids (vocabulary/mapping.py); sessions
and proposals use the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from outrider.drafting.growth.draft import BEAM_WIDTH, Draft
from outrider.drafting.methods.draft_states import DraftState, DraftStates
from outrider.drafting.methods.growing import GrowingMethod
from outrider.drafting.session import DraftSession
from outrider.drafting.vocabulary.mapping import DraftIds, VocabularyMap
from outrider.engine.attention.block_manager import BlockManager, BlockTable, OutOfBlocks
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.recurrent.rows import StateRows
from outrider.engine.recurrent.table import OutOfSlots
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
    """In draft ids: the committed tokens, and the tokens whose KV is cached, a chain's included.

    recurrent: at the position where the cache ends; None: the model has no recurrent layers.
    """

    table: BlockTable
    committed: DraftIds
    cached_ids: list[int] = field(default_factory=list)
    recurrent: DraftState | None = None


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
        `draw_chains`; None, another vocabulary, or recurrent layers, whose states a step on the device does not have:
        all logits go to the host.
        """
        self.vocabulary = vocabulary
        self.chains = chains if vocabulary is None and runner.states is None else None
        self._runner = runner
        self._blocks = blocks
        self._prefill_chunk_size = prefill_chunk_size
        self._states: dict[int, _State] = {}
        self._recurrent = DraftStates(runner.states) if runner.states is not None else None

    @property
    def loaded(self) -> LoadedModel:
        return self._runner.loaded

    def open(self, session: DraftSession) -> None:
        committed = DraftIds(self.vocabulary)
        committed.follow(session)
        state = _State(BlockTable(cache_salt=session.spec.cache_salt), committed)
        self._find_prefix(state)
        self._states[id(session)] = state

    def advance(self, session: DraftSession) -> bool:
        state = self._states[id(session)]
        self._cut_back(session, state)
        ids, start = state.committed.ids, len(state.cached_ids)
        if len(ids) > self._runner.loaded.max_model_len or len(ids) - start <= CATCH_UP_ROWS:
            return False
        chunk = ids[start : self._end_of_piece(start, len(ids))]
        if not self._grow(state, start + len(chunk), spared=[state]):
            return False
        states = self._state_rows(state, start, len(chunk))
        rows = SessionRows(chunk, start, state.table.block_ids, num_logits_rows=0, state=states)
        self._runner.forward(build_batch([rows], self._blocks.block_size))
        state.cached_ids.extend(chunk)
        end = len(state.cached_ids)
        is_behind = len(ids) - end > CATCH_UP_ROWS
        self._blocks.register(state.table, ids, end)
        if self._recurrent is not None and state.recurrent is not None:
            self._recurrent.settle(state.recurrent, end, keeps_earlier=False)
            if not is_behind and end % self._blocks.block_size == 0:
                self._recurrent.keep(state.recurrent, state.table.block_hashes[-1], end)
        return is_behind

    def _end_of_piece(self, start: int, num_ids: int) -> int:
        """Of recurrent states only those at a block's end can be shared with other sessions."""
        end, size = min(start + self._prefill_chunk_size, num_ids - 1), self._blocks.block_size
        return end if self._recurrent is None or end // size * size <= start else end // size * size

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
        self._keep(served, rows)
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
        self._keep(served, rows)
        for draft in served:
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
            self._free(state)

    def _make_room(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Stops the drafts for which no room can be made, and returns the others."""
        states = [self._states[id(draft.session)] for draft in drafts]
        served: list[_State] = []
        for draft, state in zip(drafts, states, strict=True):
            if draft.nodes:
                # Where no shared token is allowed, an end token is proposed, which the draft model may not have.
                has_tokens = len(self._own_ids(draft, draft.frontier)) == len(draft.frontier)
                has_room = has_tokens and self._grow(state, 0, spared=states, unmoved=states)
            else:
                self._cut_back(draft.session, state)
                num_ids = len(state.committed.ids)
                draft.max_depth = min(draft.max_depth, self._runner.loaded.max_model_len - num_ids, self._most(draft))
                has_room = num_ids > 0 and draft.max_depth > 0
                has_room = has_room and self._grow(state, num_ids + draft.max_rows, spared=states, unmoved=served)
            if has_room:
                served.append(state)
            else:
                draft.stop()
        return [draft for draft in drafts if draft.frontier]

    def _most(self, draft: Draft) -> int:
        """The depth that fits a log of recurrent states: of a chain a row per token, of a tree those above a frontier.

        It depends on no token, so that sampled proposals keep their law.
        """
        if self._recurrent is None:
            return draft.max_depth
        num_rows = self._recurrent.num_log_rows
        return num_rows if draft.is_chain else 1 + (num_rows - 1) // BEAM_WIDTH

    def _rows(self, draft: Draft) -> SessionRows:
        state = self._states[id(draft.session)]
        committed, start, block_ids = state.committed.ids, len(state.cached_ids), state.table.block_ids
        if not draft.nodes:
            num_rows = len(committed) - start
            # One row after a rejection, two otherwise.
            # CUDA graphs replay only batches of which the logits of every row are wanted.
            num_logits_rows = num_rows if num_rows <= _FEW_ROWS else 1
            states = self._state_rows(state, start, num_rows)
            return SessionRows(committed[start:], start, block_ids, num_logits_rows, state=states)
        if draft.is_chain:
            token_ids = self._own_ids(draft, [len(draft.nodes) - 1])
            return SessionRows(token_ids, start, block_ids, 1, state=self._state_rows(state, start, 1))
        positions = draft.rows()
        # A state needs a committed token: the last one again, whose KV comes out as it is.
        chain = [] if self._recurrent is None else committed[-1:]
        first = len(committed) - len(chain)
        return SessionRows(
            token_ids=[*chain, *self._own_ids(draft, positions)],
            context_len=first,
            block_ids=block_ids,
            num_logits_rows=len(positions),
            num_chain_rows=len(chain),
            parents=[len(chain) + parent for parent in draft.parents_of(positions)],
            state=self._state_rows(state, first, 1),
        )

    def _state_rows(self, state: _State, start: int, num_committed: int) -> StateRows | None:
        if self._recurrent is None or state.recurrent is None:
            return None
        return self._recurrent.rows(state.recurrent, start, num_committed)

    def _keep(self, drafts: Sequence[Draft], rows: Sequence[SessionRows]) -> None:
        """After a forward: what it has computed is cached, but not a tree's nodes."""
        grown: list[DraftState] = []
        for draft, draft_rows in zip(drafts, rows, strict=True):
            state = self._states[id(draft.session)]
            num_ids = len(state.committed.ids)
            if not draft.nodes or draft.is_chain:
                state.cached_ids.extend(draft_rows.token_ids)
            if self._recurrent is None or state.recurrent is None:
                num_final = num_ids
            elif not draft.nodes:
                self._recurrent.settle(state.recurrent, num_ids)
                # Blocks in the prefix cache cannot be cut, and a state cannot be computed again from their start.
                num_final = state.recurrent.oldest_position
            elif draft.is_chain:
                grown.append(state.recurrent)
            else:
                self._recurrent.forget_forward(state.recurrent)
            if not draft.nodes:
                self._blocks.register(state.table, state.committed.ids, num_final)
        if self._recurrent is not None:
            self._recurrent.append(grown)

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
        if self._recurrent is not None and state.recurrent is not None:
            while (position := self._recurrent.rewind(state.recurrent, agreed)) < agreed:
                agreed = self._blocks.truncate(state.table, position)
        del state.cached_ids[agreed:]
        if self._recurrent is not None and not state.cached_ids:
            self._free(state)
            self._find_prefix(state)

    def _find_prefix(self, state: _State) -> None:
        """Opens the table, and the state, at the longest cached prefix of the committed tokens."""
        ids, salt = state.committed.ids, state.table.cache_salt
        if self._recurrent is None:
            state.table, num_cached = self._blocks.open(ids, salt)
        else:
            state.table, num_cached = self._blocks.open(ids, salt, self._recurrent.table.has_snapshot)
            state.recurrent = self._recurrent.open(state.table.block_hashes)
        state.cached_ids = ids[:num_cached]

    def _free(self, state: _State) -> None:
        self._blocks.close(state.table)
        if self._recurrent is not None and state.recurrent is not None:
            self._recurrent.close(state.recurrent)

    def _grow(
        self, state: _State, num_positions: int, *, spared: Sequence[_State], unmoved: Sequence[_State] = ()
    ) -> bool:
        """Makes room, if needed by evicting the caches of sessions not `spared`, which are recomputed.

        For recurrent states only the `unmoved` are spared: each session at rest has one, so that in a batch of spared
        ones none might find another.
        """
        while True:
            try:
                self._blocks.grow(state.table, num_positions)
                if self._recurrent is not None and state.recurrent is not None:
                    self._recurrent.reserve(state.recurrent)
                return True
            except OutOfBlocks:
                victim = self._victim(spared)
            except OutOfSlots:
                victim = self._victim(spared) or self._victim([*unmoved, state], newest=True)
            if victim is None:
                return False
            self._blocks.truncate(victim.table, 0)
            victim.cached_ids.clear()
            if self._recurrent is not None and victim.recurrent is not None:
                self._recurrent.evict(victim.recurrent)

    def _victim(self, spared: Sequence[_State], *, newest: bool = False) -> _State | None:
        kept = {id(other) for other in spared}
        holders = [each for each in self._states.values() if id(each) not in kept and each.table.block_ids]
        return holders[-1 if newest else 0] if holders else None
