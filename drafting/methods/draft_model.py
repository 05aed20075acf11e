"""Drafts with a small language model (Leviathan et al. 2023).

Each session has its own paged KV cache. A chain's draft tokens stay in it until the next commit, which truncates it to
the confirmed ones. A tree's nodes are recomputed at each depth in one forward: at a draft model's size the extra rows
cost next to nothing, and they are not cached. A hybrid's recurrent states are cut along with the cache (draft_caches);
its trees begin with the last committed token, since a forward with recurrent states needs one.

A draft model with another vocabulary than the target's reads and caches its own ids (vocabulary/mapping.py); sessions
and proposals use the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from outrider.drafting.growth.draft import BEAM_WIDTH, Draft
from outrider.drafting.methods.draft_caches import DraftCache, DraftCaches
from outrider.drafting.methods.draft_states import DraftState
from outrider.drafting.methods.growing import GrowingMethod
from outrider.drafting.session import DraftSession
from outrider.drafting.vocabulary.mapping import VocabularyMap
from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.attention.block_manager import BlockManager
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from outrider.engine.sampling.chains import ChainStart, DrawnToken
from outrider.engine.sampling.cpu_chains import CpuChains
from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.engine.sampling.laws import Row
from outrider.shared.messages import DraftMethodInfo

if TYPE_CHECKING:
    from outrider.engine.sampling.device_chains import DeviceChains

MAX_DRAFT_TOKENS = 16
# tokens; largest backlog that a proposal catches up with; more goes through `advance`, so that a long prompt does not
# delay other sessions' drafts
CATCH_UP_ROWS = 64
_FEW_ROWS = 4


def draft_model_method(net: DraftModelNet, model_name: str) -> GrowingMethod:
    """Makes the method over a loaded draft model; its info and its proposals are in target ids."""
    loaded, target = net.loaded, net.vocabulary.target if net.vocabulary else None
    spoken = target or loaded
    info = DraftMethodInfo(
        name="draft_model",
        model=model_name,
        max_num_draft_tokens=MAX_DRAFT_TOKENS,
        proposes_trees=True,
        # A limit in draft tokens means nothing to callers; the net enforces it.
        max_model_len=0 if target else loaded.max_model_len,
        vocab_size=spoken.vocab_size,
    )
    grammars = GrammarCompiler(spoken.path, spoken.vocab_size, spoken.eos_token_ids)
    draw_chains = net.draw_chains if net.chains is not None else None
    return GrowingMethod(net, info, eos_token_ids=spoken.eos_token_ids, grammars=grammars, draw_chains=draw_chains)


class DraftModelNet:
    """Implements drafting.methods.net.DraftNet over an HF causal language model."""

    def __init__(
        self,
        runner: ModelRunner,
        blocks: BlockManager,
        *,
        prefill_chunk_size: int,
        vocabulary: VocabularyMap | None = None,
        chains: DeviceChains | CpuChains | None = None,
    ) -> None:
        """Takes the model's runner.

        vocabulary: None when the model's token ids are the target's. chains: over the same runner, for `draw_chains`.
        Drafts grow token by token without chains, with another vocabulary, or with recurrent layers, whose states a
        chain's steps do not have.
        """
        self.vocabulary = vocabulary
        self.chains = chains if vocabulary is None and runner.states is None else None
        self._runner = runner
        self._caches = DraftCaches(blocks, runner.states)
        self._prefill_chunk_size = prefill_chunk_size

    @property
    def loaded(self) -> LoadedModel:
        return self._runner.loaded

    def open(self, session: DraftSession) -> None:
        self._caches.open(session, self.vocabulary)

    def advance(self, session: DraftSession) -> bool:
        cache = self._caches.of(session)
        self._caches.cut_back(session, cache)
        ids, start = cache.committed.ids, len(cache.cached_ids)
        if len(ids) > self._runner.loaded.max_model_len or len(ids) - start <= CATCH_UP_ROWS:
            return False
        chunk = ids[start : self._caches.end_of_piece(start, len(ids), self._prefill_chunk_size)]
        if not self._caches.grow(cache, start + len(chunk), spared=[cache]):
            return False
        states = self._caches.state_rows(cache, start, len(chunk))
        rows = SessionRows(chunk, start, cache.table.block_ids, num_logits_rows=0, state=states)
        self._runner.forward(build_batch([rows], self._caches.blocks.block_size))
        cache.cached_ids.extend(chunk)
        end = len(cache.cached_ids)
        is_behind = len(ids) - end > CATCH_UP_ROWS
        self._caches.blocks.register(cache.table, ids, end)
        if self._caches.recurrent is not None and cache.recurrent is not None:
            self._caches.recurrent.settle(cache.recurrent, end, keeps_earlier=False)
            if not is_behind and end % self._caches.blocks.block_size == 0:
                self._caches.recurrent.keep(cache.recurrent, cache.table.block_hashes[-1], end)
        return is_behind

    def logits(self, drafts: Sequence[Draft]) -> list[Sequence[Row]]:
        served = self._make_room(drafts)
        if not served:
            return [() for _ in drafts]
        rows = [self._rows(draft) for draft in served]
        batch = build_batch(rows, self._caches.blocks.block_size)
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
        """Finishes plain chains without Python between their tokens; the CPU leaves chains with many rows to `grow`."""
        if self.chains is None:
            raise ValueError("this net's drafts grow token by token")
        served = self._make_room(drafts)
        if not served:
            return
        rows = [self._rows(draft) for draft in served]
        if isinstance(self.chains, CpuChains):
            taken = self.chains.taken(rows)
            self._draw_recorded(self.chains, [served[place] for place in taken], [rows[place] for place in taken])
            return
        logits = self._runner.forward(build_batch(rows, self._caches.blocks.block_size)).logits
        starts, last_rows = [], np.cumsum([draft_rows.num_logits_rows for draft_rows in rows]) - 1
        self._keep(served, rows)
        for draft in served:
            cache = self._caches.of(draft.session)
            starts.append(ChainStart(len(cache.cached_ids), cache.table.block_ids, draft.chain_draws()))
        first_logits = logits[torch.from_numpy(last_rows).to(logits.device)]
        self._take(served, starts, self.chains.draw(first_logits, starts))

    def _draw_recorded(self, chains: CpuChains, served: Sequence[Draft], rows: Sequence[SessionRows]) -> None:
        if not served:
            return
        starts = [
            ChainStart(part.context_len + len(part.token_ids), part.block_ids, draft.chain_draws())
            for draft, part in zip(served, rows, strict=True)
        ]
        found = chains.draw(rows, [torch.empty(len(part.token_ids), 0) for part in rows], starts)
        self._keep(served, rows)
        self._take(served, starts, found)

    def _take(
        self, served: Sequence[Draft], starts: Sequence[ChainStart], chains: Sequence[Sequence[DrawnToken]]
    ) -> None:
        for draft, start, chain in zip(served, starts, chains, strict=True):
            draft.take_chain(chain)
            computed = [drawn.token_id for drawn in chain[: start.draws.num_tokens - 1]]
            self._caches.of(draft.session).cached_ids.extend(computed)

    def close(self, session: DraftSession) -> None:
        self._caches.close(session)

    def _make_room(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Stops the drafts for which no room can be made, and returns the others."""
        caches = [self._caches.of(draft.session) for draft in drafts]
        served: list[DraftCache] = []
        for draft, cache in zip(drafts, caches, strict=True):
            if draft.nodes:
                # If no shared token is allowed, an end token is proposed, which the draft model may not have.
                has_tokens = len(self._own_ids(draft, draft.frontier)) == len(draft.frontier)
                has_room = has_tokens and self._caches.grow(cache, 0, spared=caches, unmoved=caches)
            else:
                self._caches.cut_back(draft.session, cache)
                num_ids = len(cache.committed.ids)
                draft.max_depth = min(draft.max_depth, self._runner.loaded.max_model_len - num_ids, self._most(draft))
                num_positions = num_ids + draft.max_rows
                has_room = num_ids > 0 and draft.max_depth > 0
                has_room = has_room and self._caches.grow(cache, num_positions, spared=caches, unmoved=served)
            if has_room:
                served.append(cache)
            else:
                draft.stop()
        return [draft for draft in drafts if draft.frontier]

    def _most(self, draft: Draft) -> int:
        """Returns the depth that fits a log of recurrent states.

        A chain takes a row per token, a tree one per node above a frontier. The depth depends on no token, so that
        sampled proposals keep their law.
        """
        if self._caches.recurrent is None:
            return draft.max_depth
        num_rows = self._caches.recurrent.num_log_rows
        return num_rows if draft.is_chain else 1 + (num_rows - 1) // BEAM_WIDTH

    def _rows(self, draft: Draft) -> SessionRows:
        cache = self._caches.of(draft.session)
        committed, start, block_ids = cache.committed.ids, len(cache.cached_ids), cache.table.block_ids
        if not draft.nodes:
            num_rows = len(committed) - start
            # A round after a rejection has one row, any other has two. CUDA graphs replay only batches of which the
            # logits of every row are wanted.
            num_logits_rows = num_rows if num_rows <= _FEW_ROWS else 1
            states = self._caches.state_rows(cache, start, num_rows)
            return SessionRows(committed[start:], start, block_ids, num_logits_rows, state=states)
        if draft.is_chain:
            token_ids = self._own_ids(draft, [len(draft.nodes) - 1])
            return SessionRows(token_ids, start, block_ids, 1, state=self._caches.state_rows(cache, start, 1))
        positions = draft.rows()
        # A state needs a committed token: the last one is computed again, and its KV does not change.
        chain = [] if self._caches.recurrent is None else committed[-1:]
        first = len(committed) - len(chain)
        return SessionRows(
            token_ids=[*chain, *self._own_ids(draft, positions)],
            context_len=first,
            block_ids=block_ids,
            num_logits_rows=len(positions),
            num_chain_rows=len(chain),
            parents=[len(chain) + parent for parent in draft.parents_of(positions)],
            state=self._caches.state_rows(cache, first, 1),
        )

    def _keep(self, drafts: Sequence[Draft], rows: Sequence[SessionRows]) -> None:
        """Marks what a forward has computed as cached, except a tree's nodes."""
        grown: list[DraftState] = []
        for draft, draft_rows in zip(drafts, rows, strict=True):
            cache = self._caches.of(draft.session)
            num_ids = len(cache.committed.ids)
            if not draft.nodes or draft.is_chain:
                cache.cached_ids.extend(draft_rows.token_ids)
            if self._caches.recurrent is None or cache.recurrent is None:
                num_final = num_ids
            elif not draft.nodes:
                self._caches.recurrent.settle(cache.recurrent, num_ids)
                # Blocks in the prefix cache cannot be cut, and a state cannot be computed again from their start.
                num_final = cache.recurrent.oldest_position
            elif draft.is_chain:
                grown.append(cache.recurrent)
            else:
                self._caches.recurrent.forget_forward(cache.recurrent)
            if not draft.nodes:
                self._caches.blocks.register(cache.table, cache.committed.ids, num_final)
        if self._caches.recurrent is not None:
            self._caches.recurrent.append(grown)

    def _own_ids(self, draft: Draft, positions: Sequence[int]) -> list[int]:
        """Returns the draft model's ids of nodes, without those that it does not have."""
        token_ids = [draft.nodes[position].token_id for position in positions]
        if self.vocabulary is None:
            return token_ids
        twins = [self.vocabulary.twin(token_id) for token_id in token_ids]
        return [token_id for token_id in twins if token_id is not None]

    def _rows_of_target(self, logits: torch.Tensor) -> Sequence[Row]:
        """Converts logits [N, draft vocabulary] to N rows over the target's, which outlive the next forward."""
        return list(logits.float().cpu().numpy().copy()) if self.vocabulary is None else self.vocabulary.rows(logits)
