"""Buffers that the calls of a draft chain on the CPU read and write, in memory that stays where it is.

Not here: the calls, and their recording (cpu_chains).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.attention.batch import ForwardBatch, SessionRows
from outrider.engine.run.row_buckets import NO_SLOT, Bucket, empty_batch
from outrider.engine.sampling.chains import ChainDraws, ChainStart, DrawnToken
from outrider.shared.messages import LAW_SIZE, LAW_TOTAL, SparseLaw

if TYPE_CHECKING:
    from outrider.kernels.row_laws.cpu_draws import Drawn, DrawTables

# rule number of rows whose token is drawn from a law; copied from kernels/row_laws/cpu_draws, which needs numba
_LAW_RULE = 3
_Array = NDArray[Any]


class DrawCalls(NamedTuple):
    """The buffers that the draws of each token of a chain read and write."""

    tables: list[DrawTables]
    drawn: list[Drawn]


class Calls(NamedTuple):
    """The buffers that a chain's calls read and write: those of its first forward, and those of each token."""

    first: ForwardBatch
    given: torch.Tensor
    steps: list[ForwardBatch]
    draws: DrawCalls


class _Views(NamedTuple):
    """The tables of Inputs as numpy arrays: tokens in rows, sessions in columns."""

    token_ids: _Array
    positions: _Array
    slots: _Array
    query_starts: _Array
    lens: _Array
    tree_starts: _Array
    tables: _Array
    last_rows: _Array
    step_slots: _Array
    step_positions: _Array
    step_lens: _Array
    step_starts: _Array
    places: _Array


class DrawBuffers:
    """The buffers that the draws of a program read and write: tokens in rows, sessions in columns."""

    def __init__(self, num_tokens: int, num_sessions: int) -> None:
        from outrider.kernels.row_laws.cpu_draws import Drawn, DrawTables

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype)

        self._tokens, self.next_ids = zeros(num_tokens, num_sessions), zeros(num_tokens, num_sessions)
        self._laws = zeros(2, num_tokens, num_sessions, LAW_SIZE)
        self._law_sizes = zeros(num_tokens, num_sessions)
        drawn = [
            Drawn(self._tokens[d], self.next_ids[d], self._laws[0, d], self._laws[1, d], self._law_sizes[d])
            for d in range(num_tokens)
        ]
        self._rules, numbers = zeros(num_sessions), zeros(num_sessions, 4, dtype=torch.float64)
        key_words, places = zeros(num_tokens, num_sessions, 2), zeros(num_tokens, num_sessions)
        tables = [DrawTables(self._rules, numbers, key_words[d], places[d]) for d in range(num_tokens)]
        self.calls = DrawCalls(tables, drawn)
        self._numbers, self._key_words, self._places = numbers.numpy(), key_words.numpy(), places.numpy()

    def clear(self) -> None:
        self._rules.zero_()
        self.next_ids.zero_()

    def fill(self, draws_of: Sequence[ChainDraws]) -> None:
        """Fills in the sessions' rules and randomness; the other sessions draw nothing."""
        from outrider.kernels.row_laws.cpu_draws import LARGEST, LAW, RACE

        rules = self._rules.numpy()
        rules[len(draws_of) :] = 0
        for index, draws in enumerate(draws_of):
            params = draws.params
            rule = LARGEST if params.greedy else (RACE if draws.law_places is None else LAW)
            rules[index] = rule
            self._numbers[index] = (params.temperature, params.top_k, params.top_p, params.min_p)
            if rule == RACE:
                self._key_words[: draws.num_tokens, index] = draws.key_words
            elif draws.law_places is not None:
                self._places[: draws.num_tokens, index] = draws.law_places

    def without_padding(self, num_sessions: int) -> DrawCalls:
        """Returns the same memory for the sessions that are there."""
        from outrider.kernels.row_laws.cpu_draws import Drawn, DrawTables

        sessions = slice(num_sessions)
        return DrawCalls(
            [DrawTables(*(part[sessions] for part in table)) for table in self.calls.tables],
            [Drawn(*(part[sessions] for part in each)) for each in self.calls.drawn],
        )

    def results(self, num_tokens: int, num_sessions: int) -> list[torch.Tensor]:
        """Returns copies of all that was drawn."""
        parts = (self._tokens, self._law_sizes)
        laws = [tuple(law) for index in range(num_sessions) for law in self._laws_of(index, num_tokens)]
        drawn = [part[:num_tokens, :num_sessions].clone() for part in parts]
        return [*drawn, torch.tensor([value for ids, counts in laws for value in (*ids, *counts)])]

    def chains(self, nums_tokens: Sequence[int]) -> list[list[DrawnToken]]:
        """Returns the tokens drawn for each session, up to the first row without a finite logit."""
        tokens = self._tokens.numpy()[:, : len(nums_tokens)].T.tolist()
        with_laws, chains = self._rules.tolist(), []
        for index, num_tokens in enumerate(nums_tokens):
            chain = tokens[index][:num_tokens]
            chain = chain[: chain.index(-1)] if -1 in chain else chain
            if with_laws[index] == _LAW_RULE:
                laws = [SparseLaw(tuple(ids), tuple(counts)) for ids, counts in self._laws_of(index, len(chain))]
                shares = [
                    law.counts[law.token_ids.index(token)] / LAW_TOTAL for token, law in zip(chain, laws, strict=True)
                ]
                chains.append([DrawnToken(*each) for each in zip(chain, shares, laws, strict=True)])
            else:
                chains.append([DrawnToken(token, float("nan")) for token in chain])
        return chains

    def _laws_of(self, index: int, num_tokens: int) -> list[tuple[list[int], list[int]]]:
        if self._rules[index] != _LAW_RULE:
            return []
        sizes = self._law_sizes[:num_tokens, index].tolist()
        return [
            (self._laws[0, d, index, :size].tolist(), self._laws[1, d, index, :size].tolist())
            for d, size in enumerate(sizes)
        ]


class Inputs:
    """The buffers of a program of R rows and S sessions; padding belongs to no session."""

    def __init__(
        self, num_rows: int, num_sessions: int, num_tokens: int, table_width: int, given_like: torch.Tensor
    ) -> None:
        self.num_tokens = num_tokens
        first = replace(
            empty_batch(Bucket(num_rows, table_width)), logits_rows=torch.zeros(num_sessions, dtype=torch.int64)
        )

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype)

        self.draws = DrawBuffers(num_tokens, num_sessions)
        self._step_slots, self._step_positions = zeros(num_tokens, num_sessions), zeros(num_tokens, num_sessions)
        self._step_lens = zeros(num_tokens, num_sessions, dtype=torch.int32)
        self._step_starts = zeros(num_sessions + 1, dtype=torch.int32)
        tree_starts, parents = torch.ones(num_sessions, dtype=torch.int32), zeros(num_sessions, dtype=torch.int32)
        steps = [
            ForwardBatch(
                token_ids=self.draws.next_ids[d],
                position_ids=self._step_positions[d],
                slot_mapping=self._step_slots[d],
                query_starts=self._step_starts,
                context_lens=self._step_lens[d],
                block_tables=first.block_tables[:num_sessions],
                tree_starts=tree_starts,
                parents=parents,
                logits_rows=torch.arange(num_sessions),
            )
            for d in range(num_tokens - 1)
        ]
        self._views = _Views(
            token_ids=first.token_ids.numpy(),
            positions=first.position_ids.numpy(),
            slots=first.slot_mapping.numpy(),
            query_starts=first.query_starts.numpy(),
            lens=first.context_lens.numpy(),
            tree_starts=first.tree_starts.numpy(),
            tables=first.block_tables.numpy(),
            last_rows=first.logits_rows.numpy(),
            step_slots=self._step_slots.numpy(),
            step_positions=self._step_positions.numpy(),
            step_lens=self._step_lens.numpy(),
            step_starts=self._step_starts.numpy(),
            places=np.arange(num_sessions + 1),
        )
        given = given_like.new_zeros(num_rows, len(given_like))
        self.calls = Calls(first, given, steps, self.draws.calls)
        self.clear()

    def clear(self) -> None:
        """Fills the buffers with padding, for the largest number of sessions: attention's work is divided for all."""
        first = self.calls.first
        for tensor in (first.slot_mapping, self._step_slots):
            tensor.fill_(NO_SLOT)
        for tensor in (first.context_lens, self._step_lens, self._step_positions):
            tensor.zero_()
        self.draws.clear()
        first.query_starts.copy_(torch.arange(len(first.query_starts)))
        first.tree_starts.fill_(1)
        self._step_starts.copy_(torch.arange(len(self._step_starts)))

    def fill(
        self,
        rows: Sequence[SessionRows],
        given: Sequence[torch.Tensor],
        starts: Sequence[ChainStart],
        block_size: int,
    ) -> None:
        """Fills the buffers, with numpy: a torch call for each took longer than a forward of a small head."""
        views, end = self._views, 0
        views.slots.fill(NO_SLOT)
        views.step_slots.fill(NO_SLOT)
        views.step_positions.fill(0)
        self.draws.fill([start.draws for start in starts])
        for index, (part, start) in enumerate(zip(rows, starts, strict=True)):
            begin, end = end, end + len(part.token_ids)
            table, count = views.tables[index], end - begin
            table[: len(start.block_ids)] = start.block_ids
            places = np.arange(part.context_len, start.position + start.draws.num_tokens - 1)
            in_cache = table[places // block_size].astype(np.int64) * block_size + places % block_size
            views.token_ids[begin:end] = part.token_ids
            views.positions[begin:end], views.slots[begin:end] = places[:count], in_cache[:count]
            views.step_positions[: len(places) - count, index] = places[count:]
            views.step_slots[: len(places) - count, index] = in_cache[count:]
            views.query_starts[index], views.last_rows[index] = begin, end - 1
            views.lens[index], views.tree_starts[index] = part.context_len, count
            self.calls.given[begin:end] = given[index]
        views.query_starts[len(rows) :] = end
        views.last_rows[len(rows) :] = 0
        views.step_lens[:] = views.step_positions
        views.step_starts[:] = np.minimum(views.places, len(rows))

    def without_padding(self, num_rows: int, num_sessions: int) -> Calls:
        """Returns the same memory without padding: for calls that check their batch."""
        calls, (rows, sessions) = self.calls, (slice(num_rows), slice(num_sessions))

        def cut(batch: ForwardBatch, rows: slice) -> ForwardBatch:
            return ForwardBatch(
                token_ids=batch.token_ids[rows],
                position_ids=batch.position_ids[rows],
                slot_mapping=batch.slot_mapping[rows],
                query_starts=batch.query_starts[: num_sessions + 1],
                context_lens=batch.context_lens[sessions],
                block_tables=batch.block_tables[sessions],
                tree_starts=batch.tree_starts[sessions],
                parents=batch.parents[rows],
                logits_rows=batch.logits_rows[sessions],
            )

        return Calls(
            cut(calls.first, rows),
            calls.given[rows],
            [cut(step, sessions) for step in calls.steps],
            self.draws.without_padding(num_sessions),
        )
