"""Draft chains on the CPU: all tokens of all sessions' drafts in one recorded program, without Python between them.

    committed rows -> forward -> [token -> forward of one row per session] ... -> token

The counterpart of sampling/device_chains. A program is recorded for a number of committed rows and of sessions, both
padded (ROW_BUCKETS), for at least LEAST_TOKENS tokens; a shorter chain ends before the program does. What is recorded
computes what the same calls compute one by one, and is compared with them before its first use.

Not here: whose chains they are (drafting/methods), the kernels (kernels/cpu/program, sampling_support/cpu_draws).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.run.batch import ForwardBatch, SessionRows
from outrider.engine.run.cpu_graphs import MEETINGS_BEFORE_RECORDING, ROW_BUCKETS, most_rows_per_session, most_threads
from outrider.engine.run.row_buckets import NO_SLOT, Bucket, empty_batch, padded_num_rows
from outrider.engine.run.runner import ModelRunner
from outrider.engine.sampling.chains import ChainStart, DrawnToken
from outrider.shared.messages import LAW_SIZE, LAW_TOTAL, SparseLaw

if TYPE_CHECKING:
    from outrider.kernels.sampling_support.cpu_draws import Drawn, DrawTables

_Array = NDArray[Any]
log = logging.getLogger(__name__)

# tokens; a program is recorded for at least as many
LEAST_TOKENS = 5
# of kernels/sampling_support/cpu_draws, which needs numba: of a row whose token is drawn from a law
_LAW_RULE = 3
# bytes of address space; only what the widest program uses is committed
_ARENA_BYTES = 1 << 27


class ChainPass(Protocol):
    """The forwards of a chain. Contract: as chains.ChainForward, on the CPU."""

    def first(self, batch: ForwardBatch, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The committed rows, with their input given [R, W] -> logits [S, V] of batch.logits_rows, and what the next
        step reads [S, H]."""
        ...

    def step(self, batch: ForwardBatch, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One row per session, likewise."""
        ...


class CpuChains:
    """Draws chains of one pass over one cache. Not for use from two threads at a time."""

    def __init__(
        self,
        chain_pass: ChainPass,
        *,
        given_like: torch.Tensor,
        target_ids: torch.Tensor | None,
        block_size: int,
        table_width: int,
        most_rows_per_session: int,
        num_threads: int,
    ) -> None:
        """given_like: one row of the first forward's input. target_ids: int64, the token ids of the logits; None: as
        they are. table_width: largest number of blocks of a session. most_rows_per_session: as in cpu_graphs.
        num_threads: of a recorded program, at most.
        """
        from outrider.kernels.cpu.program.arena import Arena  # numba imports slowly

        self._pass = chain_pass
        self._given_like = given_like
        self._target_ids = None if target_ids is None else target_ids.contiguous()
        self._block_size, self._table_width = block_size, table_width
        self._most_rows_per_session = most_rows_per_session
        self._num_threads = num_threads
        self._arena = Arena(_ARENA_BYTES)
        self._sizes: dict[tuple[int, int], _Inputs] = {}
        self._meetings: Counter[tuple[int, int]] = Counter()
        self._runs: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._is_refused = False

    def taken(self, rows: Sequence[SessionRows]) -> list[int]:
        """Which sessions `draw` takes, by their places: those with few rows, if they are not too many together."""
        places = [
            place
            for place, part in enumerate(rows)
            if len(part.token_ids) <= self._most_rows_per_session and len(part.block_ids) <= self._table_width
        ]
        return places if places and _key_of([len(rows[place].token_ids) for place in places]) is not None else []

    @torch.inference_mode()
    def draw(
        self, rows: Sequence[SessionRows], given: Sequence[torch.Tensor], starts: Sequence[ChainStart]
    ) -> list[list[DrawnToken]]:
        """One chain per session, from its committed rows and their inputs. A chain ends before a row without a finite
        logit. Writes the keys and values of all tokens but the last. Raises ValueError unless it takes the rows.
        """
        lens = [len(part.token_ids) for part in rows]
        key = _key_of(lens)
        if key is None:
            raise ValueError(f"{lens} rows are too many for a chain")
        num_tokens = max(start.draws.num_tokens for start in starts)
        inputs = self._sizes.get(key)
        if inputs is None or inputs.num_tokens < num_tokens:
            inputs = _Inputs(*key, max(num_tokens, LEAST_TOKENS), self._table_width, self._given_like)
            self._sizes[key] = inputs
            self._runs.pop(key, None)
        runs = self._runs.get(key)
        self._meetings[key] += 1
        if runs is None and not self._is_refused and self._meetings[key] >= MEETINGS_BEFORE_RECORDING:
            runs = self._record(inputs)
        inputs.fill(rows, given, starts, self._block_size)
        if runs is not None and key not in self._runs:
            self._compare(key, runs, inputs, inputs.without_padding(sum(lens), len(rows)), num_tokens)
        elif runs is not None:
            runs[num_tokens - 1]()
        else:
            self._compute(inputs.without_padding(sum(lens), len(rows)), num_tokens)
        return inputs.chains([start.draws.num_tokens for start in starts])

    def _compute(self, inputs: _Calls, num_tokens: int, cut: Callable[[], None] = lambda: None) -> None:
        from outrider.kernels.sampling_support.cpu_draws import draw

        logits, carried = self._pass.first(inputs.first, inputs.given)
        for depth in range(num_tokens):
            if depth > 0:
                cut()
                logits, carried = self._pass.step(inputs.steps[depth - 1], carried)
            draw(
                logits.float(),
                inputs.tables[depth],
                inputs.drawn[depth],
                target_ids=self._target_ids,
                law_total=LAW_TOTAL,
            )

    def _record(self, inputs: _Inputs) -> list[Callable[[], None]] | None:
        """What runs chains of 1, 2, ... tokens; None if they cannot be recorded."""
        from outrider.kernels.cpu.program.recorder import Recorder
        from outrider.kernels.cpu.team import recording

        inputs.clear()
        recorder = Recorder(self._arena, self._num_threads)
        try:
            with recording(recorder), recorder:
                self._compute(inputs.calls, inputs.num_tokens, recorder.cut)
        except Exception as error:  # chains that cannot be recorded still run
            self._refuse(f"{type(error).__name__}: {error}")
            return None
        return recorder.recorded_to_cuts()

    def _compare(
        self,
        key: tuple[int, int],
        runs: list[Callable[[], None]],
        inputs: _Inputs,
        without_padding: _Calls,
        num_tokens: int,
    ) -> None:
        """Keeps what was recorded if it draws what its calls draw one by one; these are drawn now."""
        num_sessions = len(without_padding.first.context_lens)
        runs[num_tokens - 1]()
        found = inputs.results(num_tokens, num_sessions)
        self._compute(without_padding, num_tokens)
        if all(map(torch.equal, found, inputs.results(num_tokens, num_sessions))):
            self._runs[key] = runs
        else:
            self._refuse("a recording did not repeat the draws of its calls")

    def _refuse(self, reason: str) -> None:
        self._is_refused = True
        self._runs.clear()
        log.info("draft chains are not recorded: %s", reason)


class ModelPass:
    """ChainPass of a language model; its state is in the cache, nothing else is given or carried."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def first(self, batch: ForwardBatch, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._runner.logits(batch), given

    def step(self, batch: ForwardBatch, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._runner.logits(batch), carried


def _key_of(lens: Sequence[int]) -> tuple[int, int] | None:
    """Committed rows and sessions that those of a batch are padded to; None: there are too many."""
    num_sessions = padded_num_rows(len(lens), ROW_BUCKETS)
    if num_sessions is None:
        return None
    num_rows = padded_num_rows(max(sum(lens), num_sessions), ROW_BUCKETS)
    return None if num_rows is None else (num_rows, num_sessions)


class _Calls(NamedTuple):
    """What the calls of a chain read and write: of its first forward, and of each token."""

    first: ForwardBatch
    given: torch.Tensor
    steps: list[ForwardBatch]
    tables: list[DrawTables]
    drawn: list[Drawn]


class _Views(NamedTuple):
    """The tables of _Inputs as numpy arrays, in the order of its fields: tokens in rows, sessions in columns."""

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
    rules: _Array
    numbers: _Array
    key_words: _Array
    law_places: _Array
    places: _Array


class _Inputs:
    """What a program of R rows and S sessions reads and writes; padding belongs to no session."""

    def __init__(
        self, num_rows: int, num_sessions: int, num_tokens: int, table_width: int, given_like: torch.Tensor
    ) -> None:
        from outrider.kernels.sampling_support.cpu_draws import Drawn, DrawTables

        self.num_tokens = num_tokens
        self._num_sessions = num_sessions
        first = replace(
            empty_batch(Bucket(num_rows, table_width)), logits_rows=torch.zeros(num_sessions, dtype=torch.int64)
        )

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype)

        self._tokens, self._next_ids = zeros(num_tokens, num_sessions), zeros(num_tokens, num_sessions)
        self._laws = zeros(2, num_tokens, num_sessions, LAW_SIZE)
        self._law_sizes = zeros(num_tokens, num_sessions)
        drawn = [
            Drawn(self._tokens[d], self._next_ids[d], self._laws[0, d], self._laws[1, d], self._law_sizes[d])
            for d in range(num_tokens)
        ]
        self._rules, self._numbers = zeros(num_sessions), zeros(num_sessions, 4, dtype=torch.float64)
        self._key_words, self._places = zeros(num_tokens, num_sessions, 2), zeros(num_tokens, num_sessions)
        tables = [
            DrawTables(self._rules, self._numbers, self._key_words[d], self._places[d]) for d in range(num_tokens)
        ]
        self._step_slots, self._step_positions = zeros(num_tokens, num_sessions), zeros(num_tokens, num_sessions)
        self._step_lens = zeros(num_tokens, num_sessions, dtype=torch.int32)
        self._step_starts = zeros(num_sessions + 1, dtype=torch.int32)
        tree_starts, parents = torch.ones(num_sessions, dtype=torch.int32), zeros(num_sessions, dtype=torch.int32)
        steps = [
            ForwardBatch(
                token_ids=self._next_ids[d],
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
            *(part.numpy() for part in (first.token_ids, first.position_ids, first.slot_mapping, first.query_starts)),
            *(part.numpy() for part in (first.context_lens, first.tree_starts, first.block_tables, first.logits_rows)),
            *(part.numpy() for part in (self._step_slots, self._step_positions, self._step_lens, self._step_starts)),
            *(part.numpy() for part in (self._rules, self._numbers, self._key_words, self._places)),
            places=np.arange(num_sessions + 1),
        )
        self.calls = _Calls(first, given_like.new_zeros(num_rows, len(given_like)), steps, tables, drawn)
        self.clear()

    def clear(self) -> None:
        """Only padding, but with the largest number of sessions: attention's work is divided for all of them."""
        first = self.calls.first
        for tensor in (first.slot_mapping, self._step_slots):
            tensor.fill_(NO_SLOT)
        for tensor in (first.context_lens, self._step_lens, self._step_positions, self._rules, self._next_ids):
            tensor.zero_()
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
        """By numpy: a torch call for each of these took longer than a forward of a small head."""
        views, end = self._views, 0
        views.slots.fill(NO_SLOT)
        views.step_slots.fill(NO_SLOT)
        views.step_positions.fill(0)
        views.rules[len(rows) :] = 0
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
            self._fill_draws(index, start)
        views.query_starts[len(rows) :] = end
        views.last_rows[len(rows) :] = 0
        views.step_lens[:] = views.step_positions
        views.step_starts[:] = np.minimum(views.places, len(rows))

    def _fill_draws(self, index: int, start: ChainStart) -> None:
        from outrider.kernels.sampling_support.cpu_draws import LARGEST, LAW, RACE

        draws, params, views = start.draws, start.draws.params, self._views
        rule = LARGEST if params.greedy else (RACE if draws.law_places is None else LAW)
        views.rules[index] = rule
        views.numbers[index] = (params.temperature, params.top_k, params.top_p, params.min_p)
        if rule == RACE:
            views.key_words[: draws.num_tokens, index] = draws.key_words
        elif draws.law_places is not None:
            views.law_places[: draws.num_tokens, index] = draws.law_places

    def without_padding(self, num_rows: int, num_sessions: int) -> _Calls:
        """The same memory, of the rows and sessions alone: for calls that check their batch."""
        from outrider.kernels.sampling_support.cpu_draws import Drawn, DrawTables

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

        return _Calls(
            cut(calls.first, rows),
            calls.given[rows],
            [cut(step, sessions) for step in calls.steps],
            [DrawTables(*(part[sessions] for part in table)) for table in calls.tables],
            [Drawn(*(part[sessions] for part in each)) for each in calls.drawn],
        )

    def results(self, num_tokens: int, num_sessions: int) -> list[torch.Tensor]:
        """Copies of all that was drawn."""
        parts = (self._tokens, self._law_sizes)
        laws = [tuple(law) for index in range(num_sessions) for law in self._laws_of(index, num_tokens)]
        drawn = [part[:num_tokens, :num_sessions].clone() for part in parts]
        return [*drawn, torch.tensor([value for ids, counts in laws for value in (*ids, *counts)])]

    def chains(self, nums_tokens: Sequence[int]) -> list[list[DrawnToken]]:
        """What was drawn for each session, up to the first row without a finite logit."""
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


def model_chains(runner: ModelRunner) -> CpuChains:
    """Over a language model whose forwards are recorded, without recurrent layers."""
    loaded, cache = runner.loaded, runner.cache
    return CpuChains(
        ModelPass(runner),
        given_like=torch.zeros(0),
        target_ids=None,
        block_size=cache.block_size,
        table_width=min(cache.num_blocks, -(-loaded.max_model_len // cache.block_size)),
        most_rows_per_session=most_rows_per_session(loaded.layer_shapes),
        num_threads=most_threads(loaded.model),
    )
