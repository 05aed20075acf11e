"""Chains drawn where the logits are: every token is the next step's input without the host between. On devices with
the triton kernels.

    first token from given logits -> [forward of one row a session -> race -> next row's inputs] ... -> one copy to host

One CUDA graph holds a step, the counting up included, and is launched once per further token; nothing waits before the
tokens are copied to the host. A graph of all steps would need a capture per length, and lengths change from round to
round.

Not here: whose chains they are (drafter_service/methods/drawn_chains), other laws than temperature and truncation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import ForwardBatch
from engine.cuda_graphs import captured_graph
from engine.device_sampling import RowFields
from engine.row_buckets import NO_SLOT, ROW_BUCKETS
from engine.runner import ModelRunner
from kernels.coupled_sample.triton import coupled_sample_with_shares
from kernels.sampling_support.transforms import Transforms
from shared.sampling_params import SamplingParams

MAX_CHAIN_TOKENS = 16


@dataclass(frozen=True)
class ChainStart:
    """One session's chain: its first token will stand at cache index `position`, and all but the last are computed.

    key_words: uint32 [tokens, 2], the noise of each; block_ids cover `position + tokens - 1` cache indices.
    """

    position: int
    block_ids: Sequence[int]
    params: SamplingParams
    key_words: NDArray[np.uint32]

    @property
    def num_tokens(self) -> int:
        return len(self.key_words)


@dataclass(frozen=True)
class DrawnToken:
    """share: how sure the drafter is, as in kernels/coupled_sample."""

    token_id: int
    share: float


class DeviceChains:
    """Draws chains of one model over one cache. Not for use from two threads at a time."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._steps: dict[tuple[int, int], _Steps] = {}

    @torch.inference_mode()
    def draw(self, first_logits: torch.Tensor, starts: Sequence[ChainStart]) -> list[list[DrawnToken]]:
        """first_logits [S, V] on the device: what stands after each session's last computed row, in its order.

        A chain ends before a row that holds no number. Writes the keys and values of all tokens but the last.
        """
        num_sessions, num_tokens = len(starts), max(start.num_tokens for start in starts)
        steps = self._steps_for(num_sessions, max(len(start.block_ids) for start in starts))
        steps.begin(first_logits, starts)
        for _ in range(num_tokens - 1):
            steps.advance()
        tokens, shares = steps.drawn()
        return [
            _until_none(tokens[: start.num_tokens, row], shares[: start.num_tokens, row])
            for row, start in enumerate(starts)
        ]

    def _steps_for(self, num_sessions: int, num_blocks: int) -> _Steps:
        width = 1 << max(0, num_blocks - 1).bit_length()
        num_rows = next((size for size in ROW_BUCKETS if size >= num_sessions), None)
        if num_rows is None or not self._runner.uses_graphs or self._runner.loaded.device.type != "cuda":
            return _Steps(self._runner, num_sessions, width)
        key = (num_rows, width)
        if key not in self._steps:
            self._steps[key] = _Steps(self._runner, num_rows, width)
            self._steps[key].capture()
        return self._steps[key]


class _Steps:
    """The device's memory of chains in the making: R rows, one per session, padding behind them."""

    def __init__(self, runner: ModelRunner, num_rows: int, table_width: int) -> None:
        self._runner = runner
        self._block_size = runner.cache.block_size
        self._graph: Any = None  # torch.cuda.CUDAGraph
        self._device = device = runner.loaded.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._token_ids = zeros(num_rows)
        self._positions = zeros(num_rows)
        # The first cache index that a row must not write: behind it lies nobody's, or another's.
        self._ends = zeros(num_rows)
        self._block_tables = zeros(num_rows, table_width, dtype=torch.int32)
        self._query_starts = zeros(num_rows + 1, dtype=torch.int32)
        self._tree_starts = zeros(num_rows, dtype=torch.int32) + 1
        self._parents = zeros(num_rows, dtype=torch.int32)
        self._logits_rows = torch.arange(num_rows, device=device)
        self._fields = RowFields(num_rows).to(device)
        # Of every token of the chains: its noise, itself, and its share.
        self._key_words = zeros(MAX_CHAIN_TOKENS, num_rows, 2, dtype=torch.int32)
        self._tokens = zeros(MAX_CHAIN_TOKENS, num_rows)
        self._shares = zeros(MAX_CHAIN_TOKENS, num_rows, dtype=torch.float32)
        self._step = zeros(1)

    def capture(self) -> None:
        """While every row is padding, which writes nothing into the cache."""
        self._graph = captured_graph(self._compute, self._device)

    def begin(self, first_logits: torch.Tensor, starts: Sequence[ChainStart]) -> None:
        num_rows, width = self._block_tables.shape
        fields = RowFields(num_rows)
        positions, ends = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
        tables = np.zeros((num_rows, width), dtype=np.int32)
        key_words = np.zeros((MAX_CHAIN_TOKENS, num_rows, 2), dtype=np.uint32)
        for row, start in enumerate(starts):
            fields.set(slice(row, row + 1), start.params)
            positions[row], ends[row] = start.position, start.position + start.num_tokens - 1
            tables[row, : len(start.block_ids)] = start.block_ids
            key_words[: start.num_tokens, row] = start.key_words
        self._load(self._positions, positions)
        self._load(self._ends, ends)
        self._load(self._block_tables, tables)
        self._load(self._query_starts, np.minimum(np.arange(num_rows + 1), len(starts)).astype(np.int32))
        self._load(self._key_words, key_words.view(np.int32))
        for mine, given in zip(self._fields, fields.to(self._device), strict=True):
            mine.copy_(given)
        self._step.zero_()
        self._draw(first_logits, len(starts))

    def advance(self) -> None:
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()

    def drawn(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """[tokens, R] each; waits for the device."""
        return self._tokens.cpu().numpy(), self._shares.cpu().numpy()

    def _compute(self) -> None:
        """One further token of every chain. No figure of it is known to the host."""
        places = torch.clamp(torch.minimum(self._positions, self._ends - 1), min=0)
        blocks = self._block_tables.gather(1, (places // self._block_size)[:, None])[:, 0].long()
        slots = blocks * self._block_size + places % self._block_size
        batch = ForwardBatch(
            token_ids=self._token_ids,
            position_ids=places,
            slot_mapping=torch.where(self._positions < self._ends, slots, NO_SLOT),
            query_starts=self._query_starts,
            context_lens=places.int(),
            block_tables=self._block_tables,
            tree_starts=self._tree_starts,
            parents=self._parents,
            logits_rows=self._logits_rows,
        )
        self._positions.add_(1)
        self._draw(self._runner.forward(batch).logits, self._token_ids.shape[0])

    def _draw(self, logits: torch.Tensor, num_rows: int) -> None:
        """The next token of the first `num_rows` rows from their logits."""
        fields = Transforms(*(field[:num_rows] for field in self._fields))
        key_words = self._key_words.index_select(0, self._step)[0, :num_rows].contiguous()
        tokens, shares = coupled_sample_with_shares(logits, fields, key_words)
        self._tokens[:, :num_rows].index_copy_(0, self._step, tokens[None])
        self._shares[:, :num_rows].index_copy_(0, self._step, shares[None])
        # A row without a number draws -1: its chain is over, and what it goes on with is of no account.
        self._token_ids[:num_rows].copy_(tokens.clamp(min=0))
        self._step.add_(1)

    def _load(self, target: torch.Tensor, values: NDArray[Any]) -> None:
        target.copy_(torch.from_numpy(values))


def _until_none(tokens: NDArray[np.int64], shares: NDArray[np.float32]) -> list[DrawnToken]:
    drawn: list[DrawnToken] = []
    for token_id, share in zip(tokens.tolist(), shares.tolist(), strict=True):
        if token_id < 0:
            break
        drawn.append(DrawnToken(token_id, share))
    return drawn
