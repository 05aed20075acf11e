"""Attention over a paged cache on the CPU, bitwise row-invariant.

Checks the arguments, divides the work into items and runs them on threads; `cpu_items`, `cpu_loading` and `cpu_tiles`
are compiled. A row's output bits depend only on its query, on the keys and values it sees in logical order, and on its
logical position (see `cpu_tiles`).

Needs numba. The first call in a process loads the compiled code, or compiles it (6 s on a free core).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from outrider.kernels.cpu import panel
from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.cpu.emitters import LANES, VECTOR_BYTES, has_dot_pairs
from outrider.kernels.cpu.record import record_types
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.kv_codes import cpu as kv_codes
from outrider.kernels.kv_codes.layout import is_coded, parts_of, scales_of
from outrider.kernels.paged_attention import cpu_call, cpu_dots, cpu_items, cpu_loading, cpu_splits, cpu_tiles
from outrider.kernels.paged_attention.arguments import BatchTables, Scoring
from outrider.kernels.paged_attention.cpu_call import ERRORS, CallFields
from outrider.kernels.paged_attention.cpu_dots import DOTTED_DIMS
from outrider.kernels.paged_attention.cpu_items import run_item
from outrider.kernels.paged_attention.cpu_loading import TILE

# query rows x heads of a group; work item, shares each loaded tile
MAX_PACKED_ROWS = 64
# query heads; with a single key/value head, items are cut by heads too: else one row of 128 heads would be one item
MAX_HEADS_PER_ITEM, MIN_HEADS_PER_ITEM = 16, 8
# units per thread that a call should have, by dividing its items by splits of the context: uneven ones even out
UNITS_PER_THREAD = 2
# bytes of split states; a call that would need more, of many rows over a long context, is not divided
MAX_PART_BYTES = 1 << 24
# scores; smaller calls run on one thread
MIN_PARALLEL_SCORES = 4096


def _make_entry(digest: int) -> Callable[[Any, int, int], None]:
    def entry(address, unit, thread):  # type: ignore[no-untyped-def]
        if digest >= 0:
            run_item(address, unit, thread)

    return entry


@functools.cache
def _entry() -> int:
    parts = (cpu_call, cpu_loading, cpu_splits, cpu_dots, cpu_tiles, cpu_items)
    return cpu_team.compile_unit(_make_entry, (panel, kv_codes, *parts))


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tables: BatchTables,
    scoring: Scoring,
    *,
    num_threads: int | None = None,
    team: cpu_team.ThreadTeam | None = None,
    plans: dict[Any, Any] | None = None,
) -> torch.Tensor:
    """See `arguments.PagedAttention`; query is bf16 or fp32, caches too or coded; D and Dv >= 16.

    Computed in fp32, or by `cpu_dots` where query and caches are bf16 and the CPU has AVX512-BF16.

    num_threads: default torch's. plans: a dict, initially empty, that the caller passes to all calls with these same
    tables (the layers of a forward): checks and layout are then done once.
    Raises KernelArgumentError.
    """
    threads = torch.get_num_threads() if num_threads is None else num_threads
    key = (
        query.shape, query.stride(), query.dtype, key_cache.shape, key_cache.stride(), key_cache.dtype,
        value_cache.shape, value_cache.stride(), *scoring._replace(sinks=None), threads,
    )  # fmt: skip
    plan: _Plan | None = None if plans is None else plans.get(key)
    if plan is None:
        plan = _make_plan((query, key_cache, value_cache), tables, scoring, threads)
        if plans is not None:
            plans[key] = plan
    out = query.new_empty((*query.shape[:2], value_cache.shape[3]))
    if plan.num_items == 0:
        return out
    # Kept alive in variables: the compiled code sees only addresses.
    error = ctypes.c_int64()
    sink_logits = None if scoring.sinks is None else _check_sinks(scoring.sinks, query)
    call = _Record.from_buffer_copy(plan.template)
    call.query, call.key_cache, call.value_cache = query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()
    call.out, call.error = out.data_ptr(), ctypes.addressof(error)
    call.sinks = 0 if sink_logits is None else sink_logits.data_ptr()
    call.scratch = cpu_team.scratch(call.scratch_stride, plan.num_threads)
    parts = query.new_empty(plan.part_floats, dtype=torch.float32)
    call.parts = parts.data_ptr()
    reads = (query, *parts_of(key_cache), *parts_of(value_cache))
    keeps = (plan, sink_logits)
    num_units, threads = plan.num_items * call.num_parts, plan.num_threads
    work = cpu_team.Work(
        _entry(), call, (out, parts), reads, num_units, threads, error, ERRORS, keeps=keeps,
    )  # fmt: skip
    cpu_team.run(work, team)
    if call.num_parts > 1:
        join = _Record.from_buffer_copy(call)
        join.joins = 1
        joining = cpu_team.Work(
            _entry(), join, (out,), (parts,), plan.num_items, threads, error, ERRORS, keeps=keeps,
        )  # fmt: skip
        cpu_team.run(joining, team)
    return out


_Record, _ = record_types(CallFields)


@dataclass(frozen=True)
class _Plan:
    """A checked call without tensor addresses; keeps alive what the template points to."""

    template: Any
    num_items: int
    num_threads: int
    part_floats: int  # of the split states
    kept_tables: tuple[torch.Tensor, ...]


def _make_plan(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tables: BatchTables,
    scoring: Scoring,
    num_threads: int,
) -> _Plan:
    query, key_cache, value_cache = tensors
    _check_tables(tables, query.shape[0])
    fields = _tensor_fields(query, key_cache, value_cache)
    max_len = tables.block_tables.shape[1] * key_cache.shape[2]
    item_starts, num_scores = _cut_items(tables, query.shape[0], max_len, fields)
    num_items = item_starts[-1]
    kept = tuple(table.contiguous() for table in (*tables, torch.tensor(item_starts)))
    names = (*BatchTables._fields, "item_starts")
    offsets = _lay_out_scratch(fields["rows_per_item"] * fields["group"], key_cache.shape[3], value_cache.shape[3])
    # A recorded call is replayed with longer contexts.
    is_small = num_scores * query.shape[1] < MIN_PARALLEL_SCORES and not cpu_team.is_recording()
    threads = 1 if is_small else num_threads
    part_rows = min(fields["rows_per_item"], query.shape[0]) * fields["group"]
    max_splits = -(-max_len // cpu_splits.SPLIT)
    part_floats = num_items * max_splits * part_rows * _state_floats(value_cache.shape[3])
    num_parts = min(max_splits, -(-threads * UNITS_PER_THREAD // max(1, num_items)))
    if threads == 1 or num_items >= threads * UNITS_PER_THREAD or 4 * part_floats > MAX_PART_BYTES:
        num_parts = 1
    threads = max(1, min(threads, num_items * num_parts))
    window_reach, window_step = scoring.window()
    template = _Record(
        **fields,
        **offsets,
        **{name: table.data_ptr() for name, table in zip(names, kept, strict=True)},
        num_parts=num_parts,
        max_splits=max_splits,
        part_rows=part_rows,
        block_table_stride=4 * tables.block_tables.shape[1],
        window_reach=window_reach,
        window_step=window_step,
        scaling=scoring.scaling,
        softcap=_checked_softcap(scoring.softcap),
    )
    return _Plan(template, num_items, threads, part_floats if num_parts > 1 else 0, kept)


def _tensor_fields(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> dict[str, int]:
    """Check query and caches; return their fields of the call record."""
    for name, tensor, num_dims in (("query", query, 3), ("key_cache", key_cache, 4), ("value_cache", value_cache, 4)):
        if tensor.dim() != num_dims or tensor.device.type != "cpu":
            raise KernelArgumentError(f"{name} must be a {num_dims}-dimensional tensor on the CPU")
        if tensor.dtype not in (torch.bfloat16, torch.float32) and (name == "query" or not is_coded(tensor)):
            raise KernelArgumentError(
                f"{name} is {tensor.dtype}; the CPU kernel takes bfloat16, float32 and caches of 8-bit codes"
            )
        if tensor.shape[-1] < LANES or tensor.stride(-1) != 1:
            raise KernelArgumentError(f"{name} must have at least {LANES} contiguous elements per head")
    if key_cache.shape[:3] != value_cache.shape[:3] or key_cache.dtype != value_cache.dtype:
        raise KernelArgumentError("key_cache and value_cache must agree in blocks, heads, block size and dtype")
    num_blocks, num_kv_heads, block_size, head_dim = key_cache.shape
    if query.shape[2] != head_dim or query.shape[1] % num_kv_heads:
        raise KernelArgumentError(f"query {tuple(query.shape)} does not fit key_cache {tuple(key_cache.shape)}")
    group = query.shape[1] // num_kv_heads
    scales_at = [0, 0]
    if is_coded(key_cache):
        scales_at = [scales_of(cache).data_ptr() - cache.data_ptr() for cache in (key_cache, value_cache)]
    if num_kv_heads == 1:
        # Each part of the query heads gets its own view of the one key/value head, with stride 0.
        group = _heads_per_item(group)
        num_kv_heads = query.shape[1] // group
        key_cache, value_cache = (cache.expand(-1, num_kv_heads, -1, -1) for cache in (key_cache, value_cache))
    fields: dict[str, int] = {
        "query": query.data_ptr(),
        "query_is_bf16": int(query.dtype == torch.bfloat16),
        "query_row_stride": query.stride(0) * query.element_size(),
        "query_head_stride": query.stride(1) * query.element_size(),
        "cache_kind": kv_codes.KINDS[key_cache.dtype],
        "is_dotted": int(query.dtype == key_cache.dtype == torch.bfloat16 and _can_dot(head_dim)),
        "key_scales_at": scales_at[0],
        "value_scales_at": scales_at[1],
        "num_blocks": num_blocks,
        "block_size": block_size,
        "num_kv_heads": num_kv_heads,
        "group": group,
        "rows_per_item": max(1, MAX_PACKED_ROWS // group),
        "head_dim": head_dim,
        "value_dim": value_cache.shape[3],
    }
    for name, cache in (("key", key_cache), ("value", value_cache)):
        fields[f"{name}_cache"] = cache.data_ptr()
        for dim, axis in enumerate(("block", "head", "slot")):
            fields[f"{name}_{axis}_stride"] = cache.stride(dim) * cache.element_size()
    return fields


def _can_dot(head_dim: int) -> bool:
    return has_dot_pairs() and head_dim >= DOTTED_DIMS and head_dim % 2 == 0


def _heads_per_item(num_heads: int) -> int:
    """The most heads, within the limits, that divide num_heads; else all."""
    sizes = range(MAX_HEADS_PER_ITEM, MIN_HEADS_PER_ITEM - 1, -1)
    return num_heads if num_heads <= MAX_HEADS_PER_ITEM else next((n for n in sizes if num_heads % n == 0), num_heads)


def _check_tables(tables: BatchTables, num_rows: int) -> None:
    num_sessions = tables.context_lens.shape[0]
    lengths = (num_sessions, num_sessions, num_sessions + 1, num_sessions, num_rows)
    for name, table, length in zip(BatchTables._fields, tables, lengths, strict=True):
        if table.dtype != torch.int32 or table.device.type != "cpu" or table.shape[0] != length:
            raise KernelArgumentError(f"{name} must be int32 on the CPU with {length} rows")


def _check_sinks(sinks: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    if sinks.shape != (query.shape[1],) or sinks.device.type != "cpu":
        raise KernelArgumentError(f"sinks must have {query.shape[1]} entries on the CPU, one per query head")
    return sinks.detach().to(torch.float32).contiguous()


def _checked_softcap(softcap: float | None) -> float:
    """The softcap, or 0 for None."""
    if softcap is not None and softcap <= 0:
        raise KernelArgumentError(f"softcap={softcap} must be positive, or None")
    return softcap or 0


def _cut_items(tables: BatchTables, num_rows: int, max_len: int, fields: dict[str, int]) -> tuple[list[int], int]:
    """Check the sessions' ranges; return their item ranges [S+1] and the number of scores per head."""
    # Lists: faster than numpy for the few entries.
    contexts, starts, trees = (table.tolist() for table in tables[1:4])
    rows_per_item, num_kv_heads = fields["rows_per_item"], fields["num_kv_heads"]
    if starts[0] != 0 or starts[-1] != num_rows:
        raise KernelArgumentError("query_starts must ascend from 0 to the number of rows")
    item_starts, num_scores = [0], 0
    for context, start, stop, tree in zip(contexts, starts[:-1], starts[1:], trees, strict=True):
        rows = stop - start
        if rows < 0 or context < 0 or tree < 0:
            raise KernelArgumentError("query_starts must ascend; context_lens and tree_starts must not be negative")
        if context + rows > max_len:
            raise KernelArgumentError(f"{context} + {rows} positions do not fit into a row of block_tables")
        item_starts.append(item_starts[-1] - rows // -rows_per_item * num_kv_heads)
        num_scores += rows * (context + rows)
    return item_starts, num_scores


def _state_floats(value_dim: int) -> int:
    return (-(-value_dim // LANES) + 2) * LANES


@functools.cache
def _lay_out_scratch(rows: int, head_dim: int, value_dim: int) -> dict[str, int]:
    """Byte offsets of one thread's scratch arrays (the queries are at 0), and the bytes of all."""
    sizes = {
        "at_keys": head_dim * TILE * 4,
        "at_values": TILE * -(-value_dim // LANES) * VECTOR_BYTES,
        "at_scores": rows * TILE * 4,
        "at_states": rows * _state_floats(value_dim) * 4,
        "at_totals": rows * _state_floats(value_dim) * 4,
        "at_ranges": rows * 16,
        "at_slots": 4 * TILE * 8,
        "at_key_scales": TILE * 4,
        "at_value_scales": TILE * 4,
    }
    offsets: dict[str, int] = {}
    end = rows * head_dim * 4
    for name, size in sizes.items():
        offsets[name] = end = -(-end // 64) * 64
        end += size
    return offsets | {"scratch_stride": -(-end // 4096) * 4096}
