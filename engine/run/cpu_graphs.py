"""Forwards of up to 192 rows on the CPU, recorded once per size and replayed without Python between the kernels.

The counterpart of cuda_graphs, with the same padding (row_buckets); see kernels/cpu/README.md. A size is recorded at
its third forward, which takes as long as a few forwards. A recording is used only if it repeats the bits of a plain
forward; a runner's first one must also repeat them on other data. Models with modules that are not lean are not
recorded: the recording cannot see what these read from data in Python.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.engine.attention.batch import ForwardBatch
from outrider.engine.attention.ops import LayerShape
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.model.row_invariant_modules import RowInvariantLinear
from outrider.engine.run.row_buckets import Bucket, empty_batch, fill, padded_num_rows

log = logging.getLogger(__name__)

# rows; sizes that forwards are padded to; the last two fit 32 sessions with 4 and 5 drafts each (2 cores of a Xeon:
# 55.5 -> 51.8 ms)
ROW_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192)
# forwards of a size until it is recorded, the recorded one included
MEETINGS_BEFORE_RECORDING = 3
# rows; most without wanted logits (prompts) in a recording; with more, padding costs more than recording saves (log:
# ed0bc33)
_MAX_UNWANTED_ROWS = 32
# weights; fewest that run on several threads: 1.7 M weights take 0.07 -> 0.08 ms on one thread on idle cores, 4 to 7 ->
# 0.12 ms on busy ones
_MIN_PARALLEL_WEIGHTS = 4_000_000
# bytes of address space; bounds the recordings' memory; only what the widest forward uses is committed
_ARENA_BYTES = 1 << 28

Tensors = tuple[torch.Tensor, dict[int, torch.Tensor]]  # logits (or another output), tapped hidden states
# Takes a batch, and its rows' further input [T, carried_width] or None.
Forward = Callable[[ForwardBatch, torch.Tensor | None], Tensors]
_Key = tuple[int, tuple[int, ...]]  # rows of the bucket, tapped layers


@dataclass(frozen=True)
class _Recorded:
    run: Callable[[], None]
    batch: ForwardBatch  # the recording's inputs
    carried: torch.Tensor | None
    outputs: Tensors  # written by it


class RecordedForwards:
    """Records and replays forwards: `run` returns what `forward` would, or None if the batch has to run unrecorded."""

    def __init__(
        self,
        forward: Forward,
        module: torch.nn.Module,
        layer_shapes: Sequence[LayerShape],
        *,
        vocab_size: int,
        table_width: int,
        carried_like: torch.Tensor | None = None,
    ) -> None:
        """Takes the forward.

        module: what `forward` runs. table_width: largest number of blocks of a session. carried_like: one row of the
        forward's further input; None: it has none.
        """
        from outrider.kernels.cpu.program.arena import Arena  # numba imports slowly

        self._forward = forward
        self._table_width = table_width
        self._most_rows_per_session = most_rows_per_session(layer_shapes)
        self._vocab_size = vocab_size
        self._carried_like = carried_like
        self._max_threads = most_threads(module)
        self._arena = Arena(_ARENA_BYTES)
        self._meetings: Counter[_Key] = Counter()
        self._recorded: dict[_Key, _Recorded] = {}
        self._is_refused = False
        self._too_many_rows = ROW_BUCKETS[-1] + 1

    def run(
        self,
        batch: ForwardBatch,
        carried: torch.Tensor | None = None,
        tap_layers: tuple[int, ...] = (),
        on_start: Callable[[], None] | None = None,
    ) -> Tensors | None:
        """Replays the batch's forward, after recording it if need be; the next run may overwrite the results.

        tap_layers: the layers that the forward taps now, part of the recording's key. on_start: called before the
        kernels run, if they do.
        """
        pieces = in_pieces(batch, self._most_rows_per_session)
        num_rows = None if pieces is None else self._bucket(pieces)
        if pieces is None or num_rows is None:
            return None
        batch = pieces
        key = (num_rows, tap_layers)
        recorded = self._recorded.get(key)
        if recorded is None:
            self._meetings[key] += 1
            if self._meetings[key] < MEETINGS_BEFORE_RECORDING:
                return None
            recorded = self._record(num_rows, batch, carried)
            if recorded is None:
                return None
            self._recorded[key] = recorded
        return self._repeat(recorded, batch, carried, on_start)

    def _bucket(self, batch: ForwardBatch) -> int | None:
        """Returns the number of rows that the batch is padded to; None if it has to run unrecorded."""
        num_given, num_wanted = batch.token_ids.shape[0], batch.logits_rows.shape[0]
        if num_given - num_wanted > _MAX_UNWANTED_ROWS or num_wanted == 0:
            return None
        num_rows = padded_num_rows(num_given, ROW_BUCKETS)
        if self._is_refused or num_rows is None or num_rows >= self._too_many_rows:
            return None
        return None if batch.block_tables.shape[1] > self._table_width else num_rows

    def _record(self, num_rows: int, batch: ForwardBatch, carried: torch.Tensor | None) -> _Recorded | None:
        from outrider.kernels.cpu.program.arena import ArenaFull
        from outrider.kernels.cpu.program.recorder import Recorder
        from outrider.kernels.cpu.team import recording

        static = empty_batch(Bucket(num_rows, self._table_width))
        # The largest number of sessions, each with one row: attention's work is divided for this number.
        static.query_starts.copy_(torch.arange(num_rows + 1))
        static.tree_starts.fill_(1)
        given = None if self._carried_like is None else self._carried_like.new_zeros(num_rows, len(self._carried_like))
        recorder = Recorder(self._arena, self._max_threads)
        try:
            with recording(recorder), recorder:
                logits, hidden = self._forward(static, given)
        except ArenaFull:
            self._too_many_rows = num_rows
            log.info(
                "forwards of %d rows or more are not recorded: they need more than %d MiB", num_rows, _ARENA_BYTES >> 20
            )
            return None
        except Exception as error:  # a forward that cannot be recorded still runs unrecorded
            self._refuse(f"{type(error).__name__}: {error}")
            return None
        outputs = self._arena.borrowed(logits), {layer: self._arena.borrowed(rows) for layer, rows in hidden.items()}
        recorded = _Recorded(recorder.recorded(), static, given, outputs)
        # Compared on other data once per runner: what a model does between kernels is the same for all sizes. The batch
        # itself comes last, so that the cache holds its keys and values.
        other = dataclasses.replace(batch, token_ids=(batch.token_ids + 1) % self._vocab_size)
        for tried in (batch,) if self._recorded else (other, batch):
            expected = self._forward(tried, carried)
            if not _are_equal(self._repeat(recorded, tried, carried), expected):
                self._refuse("a recording did not repeat the forward's bits")
                return None
        return recorded

    def _repeat(
        self,
        recorded: _Recorded,
        batch: ForwardBatch,
        carried: torch.Tensor | None,
        on_start: Callable[[], None] | None = None,
    ) -> Tensors:
        fill(recorded.batch, batch)
        if recorded.carried is not None and carried is not None:
            recorded.carried[: carried.shape[0]] = carried
        if on_start is not None:
            on_start()
        recorded.run()
        num_rows = batch.token_ids.shape[0]
        logits, hidden = recorded.outputs
        if num_rows < len(logits):
            logits, hidden = logits[:num_rows], {layer: rows[:num_rows] for layer, rows in hidden.items()}
        return _rows_of(logits, batch.logits_rows), hidden

    def _refuse(self, reason: str) -> None:
        self._is_refused = True
        self._recorded.clear()
        log.info("forwards of few rows are not recorded: %s", reason)


def is_recordable(loaded: LoadedModel) -> bool:
    """Returns whether all modules are lean, without experts, in one process, on the CPU with its compiled kernels."""
    on_cpu = loaded.device.type == "cpu" and loaded.attention_ops.backend == "cpu"
    has_experts = loaded.row_invariance is not None and loaded.row_invariance.num_routers > 0
    is_lean = loaded.lean is not None and loaded.lean.is_whole
    return on_cpu and loaded.leader is None and is_lean and not has_experts


def most_rows_per_session(layer_shapes: Sequence[LayerShape]) -> int:
    """Returns the most rows of a session in one work item of attention; a recording fixes the number of items."""
    from outrider.kernels.paged_attention.cpu import MAX_PACKED_ROWS

    widest_group = max((shape.num_query_heads // shape.num_kv_heads for shape in layer_shapes), default=1)
    return max(1, MAX_PACKED_ROWS // widest_group)


def in_pieces(batch: ForwardBatch, most_rows: int) -> ForwardBatch | None:
    """Returns the batch with chains of more rows cut into sessions of at most `most_rows`.

    Each piece has the rows before it as context: a layer writes the keys and values of all rows before it attends.
    None for longer trees, and for rows of recurrent layers, which follow each other.
    """
    starts, tree_starts = batch.query_starts.numpy(), batch.tree_starts.numpy()
    lens = np.diff(starts)
    if not len(lens) or lens.max() <= most_rows:
        return batch
    if batch.recurrent is not None or (tree_starts < lens)[lens > most_rows].any():
        return None
    num_pieces = -(-lens // most_rows)
    session = np.repeat(np.arange(len(lens)), num_pieces)
    offset = most_rows * (np.arange(len(session)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces))
    piece_lens = np.minimum(most_rows, lens[session] - offset)
    piece_starts = np.append(starts[session] + offset, starts[-1])
    piece_contexts = batch.context_lens.numpy()[session] + offset
    piece_trees = np.minimum(tree_starts[session], piece_lens)
    return dataclasses.replace(
        batch,
        query_starts=torch.from_numpy(piece_starts.astype(np.int32)),
        context_lens=torch.from_numpy(piece_contexts.astype(np.int32)),
        block_tables=batch.block_tables[torch.from_numpy(session)],
        tree_starts=torch.from_numpy(piece_trees.astype(np.int32)),
    )


def most_threads(module: torch.nn.Module) -> int:
    """Returns the number of threads that speed up the module's recorded forwards."""
    linears = (part for part in module.modules() if isinstance(part, RowInvariantLinear))
    num_weights = sum(linear.in_features * linear.out_features for linear in linears)
    return 1 if num_weights < _MIN_PARALLEL_WEIGHTS else torch.get_num_threads()


def _rows_of(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns tensor[rows] for ascending rows.

    That is the tensor itself for all rows, else a copy by runs of consecutive rows. A copy of 24 rows of 49,152 logits,
    in fresh memory, took 4 % of the engine's thread.
    """
    if len(rows) == len(tensor):
        return tensor
    tensor = tensor.contiguous()
    copy = tensor.new_empty(len(rows), *tensor.shape[1:])
    cuts = [0, *(torch.nonzero(rows.diff() > 1).flatten() + 1).tolist(), len(rows)]
    for start, end in itertools.pairwise(cuts):
        ctypes.memmove(copy[start:].data_ptr(), tensor[int(rows[start])].data_ptr(), copy[start:end].nbytes)
    return copy


def _are_equal(ours: Tensors, theirs: Tensors) -> bool:
    (logits, hidden), (their_logits, their_hidden) = ours, theirs
    same = hidden.keys() == their_hidden.keys() and torch.equal(logits, their_logits)
    return same and all(torch.equal(hidden[layer], their_hidden[layer]) for layer in hidden)
