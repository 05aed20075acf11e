"""Pads batches to a few sizes, so that one captured forward serves many: pure functions of host tensors.

Padding rows belong to no session: no slot is written for them, attention skips them, and their results are dropped. Not
here: capture and replay (cuda_graphs, cpu_graphs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.engine.attention.batch import ForwardBatch
from outrider.kernels.recurrent.rows import RecurrentRows

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
# blocks; the narrowest padded block table, and how much wider the next one is; 512 positions of blocks of 16 are one
# split of the attention kernel, and a growing session then meets a new width, which has to be captured, three times on
# its way to 16,000 positions
_LEAST_WIDTH, _WIDTH_RATIO = 32, 4
NO_SLOT = -1


@dataclass(frozen=True)
class Bucket:
    """The size of a padded batch: num_rows rows, sessions and logits rows each; block tables of table_width blocks."""

    num_rows: int
    table_width: int
    most_kept: int | None = None  # rows that a session replays; None for a model without recurrent layers


def bucket_of(batch: ForwardBatch) -> Bucket | None:
    """Returns the smallest bucket that holds a batch.

    None if the batch has more rows, or rows without wanted logits (prefills, which keep the GPU busy without a graph).
    """
    num_rows = batch.token_ids.shape[0]
    rows = padded_num_rows(num_rows, ROW_BUCKETS) if batch.logits_rows.shape[0] == num_rows else None
    width = batch.block_tables.shape[1]
    most_kept = None if batch.recurrent is None else _power_of_two(batch.recurrent.kept_rows.shape[1])
    return None if rows is None else Bucket(rows, padded_table_width(width), most_kept)


def padded_table_width(num_blocks: int) -> int:
    """Returns the smallest width of padded block tables that holds num_blocks."""
    width = _LEAST_WIDTH
    while width < num_blocks:
        width *= _WIDTH_RATIO
    return width


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def padded_num_rows(num_rows: int, sizes: Sequence[int]) -> int | None:
    """Returns the smallest of the ascending sizes that is >= num_rows; None if there is none, or no rows."""
    return next((size for size in sizes if size >= num_rows > 0), None)


def empty_batch(bucket: Bucket, device: torch.device | str = "cpu") -> ForwardBatch:
    """Returns a batch of padding only, with the bucket's shapes."""
    rows = bucket.num_rows

    def full(size: int | tuple[int, ...], value: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(size if isinstance(size, tuple) else (size,), value, dtype=dtype, device=device)

    return ForwardBatch(
        token_ids=full(rows, 0, torch.int64),
        position_ids=full(rows, 0, torch.int64),
        slot_mapping=full(rows, NO_SLOT, torch.int64),
        query_starts=full(rows + 1, 0, torch.int32),
        context_lens=full(rows, 0, torch.int32),
        block_tables=full((rows, bucket.table_width), 0, torch.int32),
        tree_starts=full(rows, 0, torch.int32),
        parents=full(rows, 0, torch.int32),
        logits_rows=torch.arange(rows, dtype=torch.int64, device=device),
        recurrent=None
        if bucket.most_kept is None
        else RecurrentRows(
            row_starts=full(rows + 1, 0, torch.int32),
            num_chain_rows=full(rows, 0, torch.int32),
            parents=full(rows, -1, torch.int32),
            slots_in=full(rows, NO_SLOT, torch.int32),
            kept_rows=full((rows, bucket.most_kept), 0, torch.int32),
            num_kept=full(rows, 0, torch.int32),
            slots_out=full(rows, NO_SLOT, torch.int32),
            sessions=full(rows, -1, torch.int32),
        ),
    )


def fill(padded: ForwardBatch, batch: ForwardBatch) -> None:
    """Overwrites `padded` (host tensors of a bucket that holds the batch) with the batch, then padding.

    By numpy: torch's calls for a few numbers each take three times as long.
    """
    num_rows, num_sessions = batch.token_ids.shape[0], batch.context_lens.shape[0]
    for name in ("token_ids", "position_ids", "parents"):
        getattr(padded, name).numpy()[:num_rows] = getattr(batch, name).numpy()
    slots, starts = padded.slot_mapping.numpy(), padded.query_starts.numpy()
    slots[:num_rows], slots[num_rows:] = batch.slot_mapping.numpy(), NO_SLOT
    starts[: num_sessions + 1], starts[num_sessions + 1 :] = batch.query_starts.numpy(), num_rows
    for name in ("context_lens", "tree_starts"):
        getattr(padded, name).numpy()[:num_sessions] = getattr(batch, name).numpy()
    padded.block_tables.numpy()[:num_sessions, : batch.block_tables.shape[1]] = batch.block_tables.numpy()
    if padded.recurrent is not None and batch.recurrent is not None:
        _fill_recurrent(padded.recurrent, batch.recurrent)


def _fill_recurrent(padded: RecurrentRows, rows: RecurrentRows) -> None:
    num_rows, num_sessions = rows.parents.shape[0], rows.slots_out.shape[0]
    padded.row_starts.fill_(num_rows)
    padded.row_starts[: num_sessions + 1] = rows.row_starts
    padded.parents[:num_rows] = rows.parents
    padded.sessions.fill_(-1)
    padded.sessions[:num_rows] = rows.sessions
    padded.slots_out.fill_(NO_SLOT)
    padded.slots_in.fill_(NO_SLOT)
    for name in ("num_chain_rows", "slots_in", "num_kept", "slots_out"):
        getattr(padded, name)[:num_sessions] = getattr(rows, name)
    padded.kept_rows[:num_sessions, : rows.kept_rows.shape[1]] = rows.kept_rows
