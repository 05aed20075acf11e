"""Draft chains drawn on the device: each token is the next step's input, without the host. Needs the triton kernels.

  first token from given logits -> [forward of one row per session -> race or law -> next row's inputs] ... -> host

One CUDA graph holds a step, position updates included, and is launched once per further token; nothing waits until the
tokens are copied to the host. (A graph of all steps would need a capture per length, which changes every round.)

Not here: whose chains they are (drafting/methods), forwards (chains), laws that depend on earlier tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.attention.batch import ForwardBatch
from outrider.engine.run.cuda_graphs import captured_graph
from outrider.engine.run.row_buckets import NO_SLOT, ROW_BUCKETS, padded_table_width
from outrider.engine.sampling.chains import ChainForward, ChainStart, DrawnToken
from outrider.engine.sampling.device_draws import Drawn, DrawTables, any_laws, chains_on_host, draw_rows
from outrider.kernels.sampling_support.transforms import Transforms

MAX_CHAIN_TOKENS = 16  # tokens; longest chain; size of the device's tables


class DeviceChains:
    """Draws chains of one forward over one cache. Not for use from two threads at a time."""

    def __init__(self, forward: ChainForward) -> None:
        self._forward = forward
        self._steps: dict[tuple[int, int, bool], _Steps] = {}
        # Shared by all graphs: they run one after another, and tensors that outlive a step lie outside the pool.
        self._pool: Any = None

    @torch.inference_mode()
    def draw(
        self, first_logits: torch.Tensor, starts: Sequence[ChainStart], carried: torch.Tensor | None = None
    ) -> list[list[DrawnToken]]:
        """Draws one chain per session, in the order of starts.

        first_logits [S, V] on the device: the logits of each session's last computed row. carried [S, width]: that
        row's state for the next; None if the forward has none.

        A chain ends before a row without a finite logit. Writes the keys and values of all tokens but the last.
        """
        chains = [start.draws for start in starts]
        width = max(len(start.block_ids) for start in starts)
        steps = self._steps_for(len(starts), width, with_laws=any_laws(chains))
        steps.begin(first_logits, starts, carried)
        for _ in range(max(draws.num_tokens for draws in chains) - 1):
            steps.advance()
        return chains_on_host(steps.drawn, chains)

    def _steps_for(self, num_sessions: int, num_blocks: int, *, with_laws: bool) -> _Steps:
        width = padded_table_width(num_blocks)
        num_rows = next((size for size in ROW_BUCKETS if size >= num_sessions), None)
        if num_rows is None or not self._forward.uses_graphs or self._forward.device.type != "cuda":
            return _Steps(self._forward, num_sessions, width, with_laws=with_laws)
        key = (num_rows, width, with_laws)
        if key not in self._steps:
            self._steps[key] = _Steps(self._forward, num_rows, width, with_laws=with_laws)
            self._pool = self._steps[key].capture(self._pool)
        return self._steps[key]


class _Steps:
    """The device state of unfinished chains: R rows, one per session, then padding."""

    def __init__(self, forward: ChainForward, num_rows: int, table_width: int, *, with_laws: bool) -> None:
        self._forward = forward
        self._block_size = forward.block_size
        self._with_laws = with_laws
        self._graph: Any = None  # torch.cuda.CUDAGraph
        self._device = device = forward.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._token_ids = zeros(num_rows)
        self._carried = zeros(num_rows, forward.carried_width, dtype=forward.carried_dtype)
        self._positions = zeros(num_rows)
        # The first cache index that a row must not write.
        self._ends = zeros(num_rows)
        self._block_tables = zeros(num_rows, table_width, dtype=torch.int32)
        self._query_starts = zeros(num_rows + 1, dtype=torch.int32)
        self._tree_starts = zeros(num_rows, dtype=torch.int32) + 1
        self._parents = zeros(num_rows, dtype=torch.int32)
        self._logits_rows = torch.arange(num_rows, device=device)
        self._tables = DrawTables.of_chains((), MAX_CHAIN_TOKENS, num_rows, device)
        # All tokens of the chains; valid until the next `begin`.
        self.drawn = Drawn.blank(MAX_CHAIN_TOKENS, num_rows, device, with_laws=with_laws)
        self._step = zeros(1)

    def capture(self, pool: Any) -> Any:
        """Captures a step while all rows are padding, which writes nothing to the cache.

        pool: of an earlier graph, or None; returns the pool for the next.
        """
        self._graph = captured_graph(self._compute, self._device, pool)
        return self._graph.pool()

    def begin(
        self, first_logits: torch.Tensor, starts: Sequence[ChainStart], carried: torch.Tensor | None = None
    ) -> None:
        num_rows, width = self._block_tables.shape
        positions, ends = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
        tables = np.zeros((num_rows, width), dtype=np.int32)
        for row, start in enumerate(starts):
            positions[row], ends[row] = start.position, start.position + start.draws.num_tokens - 1
            tables[row, : len(start.block_ids)] = start.block_ids
        self._load(self._positions, positions)
        self._load(self._ends, ends)
        self._load(self._block_tables, tables)
        self._load(self._query_starts, np.minimum(np.arange(num_rows + 1), len(starts)).astype(np.int32))
        chains = [start.draws for start in starts]
        self._tables.load(DrawTables.of_chains(chains, MAX_CHAIN_TOKENS, num_rows, self._device))
        if carried is not None:
            self._carried[: len(starts)].copy_(carried)
        self._step.zero_()
        self._draw(first_logits, len(starts))

    def advance(self) -> None:
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()

    def _compute(self) -> None:
        """Computes one further token of every chain, entirely on the device."""
        positions = torch.clamp(torch.minimum(self._positions, self._ends - 1), min=0)
        blocks = self._block_tables.gather(1, (positions // self._block_size)[:, None])[:, 0].long()
        slots = blocks * self._block_size + positions % self._block_size
        batch = ForwardBatch(
            token_ids=self._token_ids,
            position_ids=positions,
            slot_mapping=torch.where(self._positions < self._ends, slots, NO_SLOT),
            query_starts=self._query_starts,
            context_lens=positions.int(),
            block_tables=self._block_tables,
            tree_starts=self._tree_starts,
            parents=self._parents,
            logits_rows=self._logits_rows,
        )
        self._positions.add_(1)
        logits, carried = self._forward.forward(batch, self._carried)
        self._carried.copy_(carried)
        self._draw(logits, self._token_ids.shape[0])

    def _draw(self, logits: torch.Tensor, num_rows: int) -> None:
        """Draws the next token of the first `num_rows` rows from their logits."""
        transforms = Transforms(*(field[:num_rows] for field in self._tables.transforms))
        key_words = self._tables.key_words.index_select(0, self._step)[0, :num_rows].contiguous()
        law_places = self._tables.law_places.index_select(0, self._step)[0, :num_rows]
        drawn = draw_rows(logits, transforms, key_words, law_places, with_laws=self._with_laws)
        for kept, part in zip(self.drawn, drawn, strict=True):
            if part.numel():
                kept[:, :num_rows].index_copy_(0, self._step, part[None])
        # A row without a finite logit draws -1: its chain is over, later tokens are ignored.
        self._token_ids[:num_rows].copy_(drawn.tokens.clamp(min=0))
        self._step.add_(1)

    def _load(self, target: torch.Tensor, values: NDArray[Any]) -> None:
        target.copy_(torch.from_numpy(values))
