"""Forwards of up to 192 rows on the CPU, recorded once per size and then run without Python between the kernels.

The counterpart of cuda_graphs, padded in the same way (row_buckets). A size is recorded the third time that it is met,
which takes as long as a few forwards, and is trusted only when it gave the very bits of a plain forward, the first one
of a runner on other data too. Models with parts that are not ours (lean) are run as they are: what such a part reads
from its data in Python could not be seen.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.batch import ForwardBatch
from engine.model import LoadedModel
from engine.paged_kv import LayerShape
from engine.row_buckets import Bucket, empty_batch, fill, padded_num_rows
from engine.row_invariant_modules import RowInvariantLinear

log = logging.getLogger(__name__)

# The last two are for 32 sessions with 4 and 5 drafts each (2 cores of a Xeon: 55.5 ms as they are, 51.8 recorded).
ROW_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192)
# The forward of a size with which it is recorded.
MEETINGS_BEFORE_RECORDING = 3
# Rows whose logits nobody wants: of prompts that are short, or cached but for their end. Of long ones they cost more
# than a recording saves (12 of them beside 31 sessions: 53.8 ms as they are, 44.5 recorded; 7 with drafts: 35.3, 27.6).
_MOST_UNWANTED_ROWS = 32
# Smaller models run on one thread: 1.7 M weights take 0.08 ms instead of 0.07 on two idle cores, and 0.12 instead of 4
# to 7 where other processes want those cores.
_MIN_PARALLEL_WEIGHTS = 4_000_000
# Of this, only what the widest forward uses is ever touched.
_ARENA_BYTES = 1 << 28

Tensors = tuple[torch.Tensor, dict[int, torch.Tensor]]  # logits (or what else a net gives), tapped hidden states
# Of a batch, and what its rows are given beside their tokens: [T, carried_width], or nothing.
Forward = Callable[[ForwardBatch, torch.Tensor | None], Tensors]
_Key = tuple[int, tuple[int, ...]]  # rows of the bucket, tapped layers


@dataclass(frozen=True)
class _Recorded:
    run: Callable[[], None]
    batch: ForwardBatch  # what the recording reads
    carried: torch.Tensor | None
    outputs: Tensors  # where it writes


class RecordedForwards:
    """`run` is what `forward` would return, or None where the batch has to be run as it is."""

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
        """module: what `forward` runs, with its attention layers. table_width: the most blocks that a session can have.
        carried_like: one row of what the forward is given beside tokens; None: nothing.
        """
        from kernels.cpu_program.arena import Arena  # numba takes a moment to import

        self._forward = forward
        self._table_width = table_width
        self._most_rows_per_session = _most_rows_per_session(layer_shapes)
        self._vocab_size = vocab_size
        self._carried_like = carried_like
        self._max_threads = 1 if _num_weights(module) < _MIN_PARALLEL_WEIGHTS else torch.get_num_threads()
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
        """tap_layers: the layers that the forward taps now; they are part of what was recorded. on_start: called before
        the kernels, if they are run."""
        num_rows = self._bucket(batch)
        if num_rows is None:
            return None
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
        """How many rows the batch is padded to; None where it has to be run as it is."""
        num_given, num_wanted = batch.token_ids.shape[0], batch.logits_rows.shape[0]
        if num_given - num_wanted > _MOST_UNWANTED_ROWS or num_wanted == 0:
            return None
        num_rows = padded_num_rows(num_given, ROW_BUCKETS)
        if self._is_refused or num_rows is None or num_rows >= self._too_many_rows:
            return None
        if batch.block_tables.shape[1] > self._table_width:
            return None
        return num_rows if int(batch.query_starts.diff().max()) <= self._most_rows_per_session else None

    def _record(self, num_rows: int, batch: ForwardBatch, carried: torch.Tensor | None) -> _Recorded | None:
        from kernels.cpu_program.arena import ArenaFull
        from kernels.cpu_program.recorder import Recorder
        from kernels.cpu_team import recording

        static = empty_batch(Bucket(num_rows, self._table_width))
        # As many sessions as there can be, of one row each: attention's work is cut up for all of them.
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
                "forwards of %d rows or more are not recorded: they take more than %d MiB", num_rows, _ARENA_BYTES >> 20
            )
            return None
        except Exception as error:  # a forward that cannot be recorded still runs as it is
            self._refuse(f"{type(error).__name__}: {error}")
            return None
        outputs = self._arena.borrowed(logits), {layer: self._arena.borrowed(rows) for layer, rows in hidden.items()}
        recorded = _Recorded(recorder.recorded(), static, given, outputs)
        # Other data are tried once: what models of this kind do between kernels is the same for all sizes. The batch
        # itself comes last, so that what is in the cache is right.
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
        hidden = {layer: _copy(rows[:num_rows]) for layer, rows in hidden.items()}
        return _copy_rows(logits[:num_rows], batch.logits_rows), hidden

    def _refuse(self, reason: str) -> None:
        self._is_refused = True
        self._recorded.clear()
        log.info("forwards of few rows are not recorded: %s", reason)


def is_recordable(loaded: LoadedModel) -> bool:
    """Whether every part of the model is ours, without experts, in one process with the compiled kernels of the CPU."""
    on_cpu = loaded.device.type == "cpu" and loaded.attention_ops.backend == "cpu"
    has_experts = loaded.row_invariance is not None and loaded.row_invariance.num_routers > 0
    is_lean = loaded.lean is not None and loaded.lean.is_whole
    return on_cpu and loaded.leader is None and is_lean and not has_experts


def _most_rows_per_session(layer_shapes: Sequence[LayerShape]) -> int:
    """So many rows of one session are one piece of work for attention; recordings count on the number of pieces."""
    from kernels.paged_attention.cpu import MAX_PACKED_ROWS

    widest_group = max(shape.num_query_heads // shape.num_kv_heads for shape in layer_shapes)
    return max(1, MAX_PACKED_ROWS // widest_group)


def _num_weights(module: torch.nn.Module) -> int:
    linears = (part for part in module.modules() if isinstance(part, RowInvariantLinear))
    return sum(linear.in_features * linear.out_features for linear in linears)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """On this thread alone: torch's clone of 16 rows of logits wakes the team, 3 ms on a busy machine."""
    tensor = tensor.contiguous()
    copy = torch.empty_like(tensor)
    ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    return copy


def _copy_rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """tensor[rows], `rows` ascending: rows that follow each other are copied at once, on this thread alone."""
    if len(rows) == len(tensor):
        return _copy(tensor)
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
