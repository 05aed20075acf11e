"""A block head over a paged cache: the forwards of its blocks, and plain chains drawn by recorded programs.

The rows of a forward are all sessions' blocks, then the context that has arrived since each one's last forward; all
write their keys and values before any row attends. In the kernel's tables a block is a session with a chain of rows.
Where a layer sees the whole block, each of its rows is a session of one row that stands after all of them. Each
session's new context is a further one, whose outputs nobody reads.

Not here: the head (drafting/heads/block), and which rows a session has (feature_rows).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.drafting.heads.block import BlockHead
from outrider.drafting.paged.paged_head import PagedModule
from outrider.engine.attention.batch import ForwardBatch
from outrider.engine.attention.layer import PagedContext
from outrider.engine.run.cpu_graphs import most_rows_per_session, most_threads
from outrider.engine.run.row_buckets import NO_SLOT
from outrider.engine.sampling.chain_inputs import DrawBuffers, DrawCalls
from outrider.engine.sampling.chains import ChainDraws, DrawnToken
from outrider.engine.sampling.cpu_chains import RecordedDraws, key_of


@dataclass(frozen=True)
class BlockPart:
    """One session's share of a forward: new context from cache index `start` on, then its block.

    states: [C, layers * width], the target's. last_token_id: the block's first row; the others are masks.
    """

    block_ids: Sequence[int]
    start: int
    states: torch.Tensor
    last_token_id: int


class BlockCalls(NamedTuple):
    """The buffers that a forward of S sessions reads, and that its draws read and write."""

    batches: Mapping[bool, ForwardBatch]  # by whether a layer is causal inside the block
    states: torch.Tensor
    last_token_ids: torch.Tensor  # int64 [S]
    rows: list[torch.Tensor]  # per drawn token, int64 [S]: the sessions' rows that predict it
    draws: DrawCalls


class _Tables:
    """The kernel's tables of S blocks of N rows and S stretches of context, in memory that stays where it is.

    is_causal: a block is one session, not one for each of its rows.
    """

    def __init__(self, num_sessions: int, num_rows: int, table_width: int, *, is_causal: bool) -> None:
        self._sizes = num_sessions, num_rows
        self._is_causal = is_causal
        self._num_owned = min(num_rows, 1) if is_causal else num_rows  # the kernel's sessions for a block
        count = num_sessions * (self._num_owned + 1)
        self.query_starts = np.zeros(count + 1, dtype=np.int32)
        self.context_lens, self.tree_starts = np.zeros((2, count), dtype=np.int32)
        self.block_tables = np.zeros((count, table_width), dtype=np.int32)

    def fill(self, starts: NDArray[Any], counts: NDArray[Any], block_ids: Sequence[Sequence[int]]) -> None:
        """Fills in sessions with `counts` rows of new context from `starts` on; the others have blocks alone."""
        (num_sessions, num_rows), owned, num_filled = self._sizes, self._num_owned, len(starts)
        first = num_sessions * owned  # of the stretches of context
        rows_each = num_rows // max(1, owned)
        self.query_starts[: first + 1] = np.arange(first + 1) * rows_each
        self.query_starts[first + 1 :] = num_sessions * num_rows + counts.sum()
        self.query_starts[first + 1 : first + 1 + num_filled] = num_sessions * num_rows + np.cumsum(counts)
        self.context_lens.fill(0)
        self.tree_starts.fill(0)
        ends = starts + counts + (0 if self._is_causal else num_rows - 1)
        self.context_lens[: num_filled * owned] = np.repeat(ends, owned)
        self.context_lens[first : first + num_filled] = starts
        self.tree_starts[:first] = rows_each
        self.tree_starts[first : first + num_filled] = counts
        for index, blocks in enumerate(block_ids):
            self.block_tables[index * owned : (index + 1) * owned, : len(blocks)] = blocks
            self.block_tables[first + index, : len(blocks)] = blocks


class BlockInputs:
    """The buffers of a forward of S blocks of N rows and C rows of context, and of `num_tokens` draws per session."""

    def __init__(
        self, head: BlockHead, sizes: tuple[int, int, int], table_width: int, states_like: torch.Tensor, num_tokens: int
    ) -> None:
        """sizes: S, N and C. states_like: one row of the target's states."""
        self.num_tokens, self._sizes = num_tokens, sizes
        num_sessions, num_rows, num_context_rows = sizes
        self._mask_token_id = head.config.mask_token_id
        total = num_sessions * num_rows + num_context_rows
        self.draws = DrawBuffers(num_tokens, num_sessions)
        self._token_ids, self._positions, self._slots = np.zeros((3, total), dtype=np.int64)
        self._last_token_ids = np.zeros(num_sessions, dtype=np.int64)
        self._tables = {
            kind: _Tables(num_sessions, num_rows, table_width, is_causal=kind) for kind in set(head.config.causal)
        }
        self.calls = BlockCalls(
            {kind: self._batch(tables) for kind, tables in self._tables.items()},
            states_like.new_zeros(num_context_rows, len(states_like)),
            torch.from_numpy(self._last_token_ids),
            [
                head.config.num_silent_rows + depth + num_rows * torch.arange(num_sessions)
                for depth in range(num_tokens)
            ],
            self.draws.calls,
        )

    def clear(self) -> None:
        """Fills the buffers with padding: attention's work is divided for sessions that are all there."""
        num_sessions, _, num_context_rows = self._sizes
        counts = np.ones(num_sessions, dtype=np.int64)
        counts[-1] = num_context_rows - (num_sessions - 1)
        for tables in self._tables.values():
            tables.fill(np.zeros_like(counts), counts, ())
        self._slots.fill(NO_SLOT)
        self.draws.clear()

    def fill(self, parts: Sequence[BlockPart], block_size: int, draws: Sequence[ChainDraws] = ()) -> None:
        """Fills in sessions, whose rows of context fit, and their draws."""
        num_sessions, num_rows, _ = self._sizes
        counts = np.array([len(part.states) for part in parts], dtype=np.int64)
        self._slots.fill(NO_SLOT)
        end = 0
        for index, (part, count) in enumerate(zip(parts, counts.tolist(), strict=True)):
            begin, end = end, end + count
            places = np.arange(part.start, part.start + count + num_rows)
            slots = np.asarray(part.block_ids)[places // block_size] * block_size + places % block_size
            block = slice(index * num_rows, (index + 1) * num_rows)
            new = slice(num_sessions * num_rows + begin, num_sessions * num_rows + end)
            self._positions[new], self._positions[block] = places[:count], places[count:]
            self._slots[new], self._slots[block] = slots[:count], slots[count:]
            self._token_ids[block] = self._mask_token_id
            self._token_ids[block.start : block.stop][:1] = part.last_token_id
            self._last_token_ids[index] = part.last_token_id
            self.calls.states[begin:end] = part.states
        starts = np.array([part.start for part in parts], dtype=np.int64)
        for tables in self._tables.values():
            tables.fill(starts, counts, [part.block_ids for part in parts])
        self.draws.fill(draws)

    def _batch(self, tables: _Tables) -> ForwardBatch:
        from_numpy = torch.from_numpy
        return ForwardBatch(
            token_ids=from_numpy(self._token_ids),
            position_ids=from_numpy(self._positions),
            slot_mapping=from_numpy(self._slots),
            query_starts=from_numpy(tables.query_starts),
            context_lens=from_numpy(tables.context_lens),
            block_tables=from_numpy(tables.block_tables),
            tree_starts=from_numpy(tables.tree_starts),
            parents=torch.zeros(len(self._slots), dtype=torch.int32),
            logits_rows=torch.zeros(0, dtype=torch.int64),
        )


class PagedBlock(PagedModule):
    """A block head over a paged cache. Not thread-safe."""

    head: BlockHead

    @property
    def states_like(self) -> torch.Tensor:
        """Returns one row of the target's states, of zeros."""
        config = self.head.config
        return torch.zeros(len(config.feature_layers) * config.target_hidden_size, dtype=self.dtype)

    @torch.inference_mode()
    def forward(self, parts: Sequence[BlockPart], num_rows: int) -> torch.Tensor:
        """Maps the sessions' parts, each with a block of num_rows (0: none) -> outputs [S, num_rows, H]."""
        sizes = len(parts), num_rows, sum(len(part.states) for part in parts)
        width = max(len(part.block_ids) for part in parts)
        inputs = BlockInputs(self.head, sizes, width, self.states_like, num_tokens=0)
        inputs.fill(parts, self.blocks.block_size)
        calls = inputs.calls
        if self.device.type != "cpu":
            moved = {kind: batch.mapped(lambda each: each.to(self.device)) for kind, batch in calls.batches.items()}
            calls = calls._replace(batches=moved, states=calls.states.to(self.device))
        return self.compute(calls).view(len(parts), num_rows, self.hidden_size)

    @torch.inference_mode()
    def logits(
        self, outputs: torch.Tensor, previous_ids: Sequence[int], states: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor | None]]:
        """Maps outputs [N, H] and the tokens before them -> logits [N, draft vocabulary], and the states after them."""
        previous = torch.tensor(previous_ids, device=self.device)
        state = None if states[0] is None else torch.stack([each for each in states if each is not None])
        logits, state = self.head.biased(self.head.lm_head(outputs), outputs, previous, state)
        return logits, [None] * len(outputs) if state is None else list(state)

    def compute(self, calls: BlockCalls) -> torch.Tensor:
        """Runs a forward of buffers on the device -> outputs [S * N, H]."""
        contexts = {kind: self.context(batch) for kind, batch in calls.batches.items()}
        batch = next(iter(calls.batches.values()))
        num_block_rows = len(batch.token_ids) - len(calls.states)
        outputs = self.head(
            batch.token_ids[None, :num_block_rows],
            self.head.fuse(calls.states)[None],
            batch.position_ids[None],
            lambda is_causal: {"paged": contexts[is_causal]},
        )
        return outputs[0]  # type: ignore[no-any-return]

    def _probe(self, token_ids: torch.Tensor, position_ids: torch.Tensor, paged: PagedContext) -> object:
        no_context = torch.zeros(1, 0, self.hidden_size, dtype=self.dtype, device=self.device)
        return self.head(token_ids, no_context, position_ids, lambda _is_causal: {"paged": paged})


class BlockChains(RecordedDraws):
    """Draws plain chains on the CPU: a block and all its draws are one recorded program."""

    def __init__(self, paged: PagedBlock) -> None:
        super().__init__(most_threads(paged.head), paged.head.target_ids)
        self._paged, self._config = paged, paged.head.config
        self._most_rows = most_rows_per_session(paged.layer_shapes)
        self._inputs: dict[tuple[int, int, int], BlockInputs] = {}

    def takes(self, parts: Sequence[BlockPart], num_tokens: int) -> bool:
        """Returns whether `draw` takes the sessions: few, with little new context, and a short block."""
        counts = [len(part.states) for part in parts]
        num_rows = self._config.num_block_rows(num_tokens)
        fits = all(len(part.block_ids) <= self._paged.table_width for part in parts)
        return (
            fits
            and max(num_rows, *counts) <= self._most_rows
            and key_of([max(1, count) for count in counts]) is not None
        )

    @torch.inference_mode()
    def draw(self, parts: Sequence[BlockPart], draws: Sequence[ChainDraws]) -> list[list[DrawnToken]]:
        """Draws one chain per session; it ends before a row without a finite logit. `takes` says which."""
        num_tokens = max(each.num_tokens for each in draws)
        buckets = key_of([max(1, len(part.states)) for part in parts])
        if buckets is None:
            raise ValueError(f"{len(parts)} sessions are too many for recorded blocks")
        num_context_rows, num_sessions = buckets
        key = (num_context_rows, num_sessions, num_tokens)
        inputs = self._inputs.get(key)
        if inputs is None:
            inputs = self._inputs[key] = self._new_inputs(num_sessions, num_context_rows, num_tokens)

        block_size = self._paged.blocks.block_size

        def without_padding() -> BlockCalls:
            exact = self._new_inputs(len(parts), sum(len(part.states) for part in parts), num_tokens)
            exact.fill(parts, block_size, draws)
            return exact.calls._replace(draws=inputs.draws.without_padding(len(parts)))

        self._run(key, inputs, num_tokens, lambda: inputs.fill(parts, block_size, draws), without_padding)
        return inputs.draws.chains([each.num_tokens for each in draws])

    def _new_inputs(self, num_sessions: int, num_context_rows: int, num_tokens: int) -> BlockInputs:
        sizes = num_sessions, self._config.num_block_rows(num_tokens), num_context_rows
        return BlockInputs(self._paged.head, sizes, self._paged.table_width, self._paged.states_like, num_tokens)

    def _compute(self, calls: BlockCalls, num_tokens: int, cut: Callable[[], None] = lambda: None) -> None:
        head = self._paged.head
        outputs = self._paged.compute(calls)
        logits_of_all = head.lm_head(outputs)
        previous_ids, state = calls.last_token_ids, None
        for depth in range(num_tokens):
            if depth > 0:
                cut()
            logits, outputs_there = (each.index_select(0, calls.rows[depth]) for each in (logits_of_all, outputs))
            logits, state = head.biased(logits, outputs_there, previous_ids, state)
            previous_ids = self._draw(logits, calls.draws, depth)
