"""CPU attention speed: against torch's SDPA, over caches of 8 bits, and against the linears of a model it would serve.

SDPA gets its best case: each session's keys and values contiguous and of equal length, no block table, no tree. The
sides alternate within a run, so ratios hold on a busy machine where milliseconds do not. Not here: correctness
(tests/kernels), serving (serving.py).

    python -m benchmarks.attention            # prints a table, about half a minute
    python -m benchmarks.attention --save     # and appends to benchmarks/results/attention.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from rich.table import Table

from benchmarks.records import save_rows
from benchmarks.screen import console, table
from outrider.kernels.kv_codes.layout import head_bytes, scales_of, view_codes
from outrider.kernels.kv_codes.reference import encode
from outrider.kernels.paged_attention import cpu
from outrider.kernels.paged_attention.arguments import BatchTables, Scoring

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    num_sessions: int
    num_rows: int  # per session; the last ones of context_len + num_rows positions
    context_len: int
    num_heads: int = 16
    num_kv_heads: int = 16
    head_dim: int = 64

    @property
    def gigaflops(self) -> float:
        scores = sum(self.context_len + row + 1 for row in range(self.num_rows))
        return 4 * scores * self.num_sessions * self.num_heads * self.head_dim / 1e9


@dataclass(frozen=True)
class Figure:
    median_ms: float
    p20_ms: float
    p80_ms: float


CASES = [
    Case(sessions, rows, context)
    for context in (128, 1000, 4000)
    for sessions, rows in ((1, 1), (1, 8), (16, 1), (16, 8))
] + [Case(16, 8, 1000, num_kv_heads=4), Case(1, 512, 0), Case(1, 512, 1000)]
# Of caches of 8 bits (--kv-cache-dtype), with the same rows.
CODE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Width 1024, MLP 2816, 12 layers: 154 M parameters without the embedding.
LINEAR_SHAPES = [(1024, 1024)] * 4 + [(2816, 1024)] * 2 + [(1024, 2816)]
NUM_LAYERS = 12
LAYER_CASE = Case(16, 8, 1000)


def _coded(cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same rows as codes of 8 bits."""
    num_blocks, num_heads, block_size, dim = cache.shape
    memory = torch.zeros(num_blocks, num_heads, head_bytes(block_size, dim), dtype=torch.uint8)
    coded = view_codes(memory, block_size, dim, dtype)
    codes, scales = encode(cache, dtype)
    coded.copy_(codes)
    scales_of(coded).copy_(scales)
    return coded


def paged_side(case: Case, code_dtype: torch.dtype | None = None) -> Callable[[], object]:
    """Attention of a case over scattered blocks. code_dtype: of a cache of 8 bits; None: bf16."""
    length = case.context_len + case.num_rows
    blocks_each = -(-length // BLOCK_SIZE)
    tables = torch.randperm(case.num_sessions * blocks_each).view(case.num_sessions, blocks_each).int()
    cache = (case.num_sessions * blocks_each, case.num_kv_heads, BLOCK_SIZE, case.head_dim)
    key_cache, value_cache = torch.randn(cache).bfloat16(), torch.randn(cache).bfloat16()
    if code_dtype is not None:
        key_cache, value_cache = _coded(key_cache, code_dtype), _coded(value_cache, code_dtype)
    num_rows = case.num_sessions * case.num_rows
    query = torch.randn(num_rows, case.num_heads, case.head_dim).bfloat16()
    return lambda: cpu.paged_attention(
        query,
        key_cache,
        value_cache,
        BatchTables(
            block_tables=tables,
            context_lens=torch.full((case.num_sessions,), case.context_len, dtype=torch.int32),
            query_starts=torch.arange(0, num_rows + 1, case.num_rows, dtype=torch.int32),
            tree_starts=torch.full((case.num_sessions,), case.num_rows, dtype=torch.int32),
            parents=torch.zeros(num_rows, dtype=torch.int32),
        ),
        Scoring(case.head_dim**-0.5),
    )


def sdpa_side(case: Case) -> Callable[[], object]:
    """The same work in torch: one dense batch, with an explicit causal mask for more than one row."""
    length = case.context_len + case.num_rows
    query = torch.randn(case.num_sessions, case.num_heads, case.num_rows, case.head_dim).bfloat16()
    keys = (case.num_sessions, case.num_kv_heads, length, case.head_dim)
    key, value = torch.randn(keys).bfloat16(), torch.randn(keys).bfloat16()
    mask = torch.ones(length, length, dtype=torch.bool).tril()[case.context_len :]
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if case.num_rows == 1 else mask,
        enable_gqa=case.num_kv_heads != case.num_heads,
    )


def linears_side(num_rows: int) -> Callable[[], object]:
    """All linears of the model, each layer with its own weights."""
    layers = [[torch.randn(shape).bfloat16() for shape in LINEAR_SHAPES] for _ in range(NUM_LAYERS)]
    inputs = {width: torch.randn(num_rows, width).bfloat16() for width in (1024, 2816)}

    def run() -> None:
        for weights in layers:
            for weight in weights:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    return run


def take_turns(sides: list[Callable[[], object]], seconds: float) -> list[Figure]:
    """Times of the sides, called in turn for about `seconds`, at least 5 times each."""
    samples: list[list[float]] = [[] for _ in sides]
    for side in sides:
        side()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples[0]) < 5:
        for side, times in zip(sides, samples, strict=True):
            start = time.perf_counter()
            side()
            times.append((time.perf_counter() - start) * 1e3)
    return [
        Figure(statistics.median(times), *(statistics.quantiles(times, n=5)[i] for i in (0, 3))) for times in samples
    ]


def measure_cases(seconds: float, shown: Table) -> list[dict[str, object]]:
    records: list[dict[str, object]] = []
    for case in CASES:
        coded_sides = [paged_side(case, dtype) for dtype in CODE_DTYPES.values()]
        paged, sdpa, *coded = take_turns([paged_side(case), sdpa_side(case), *coded_sides], seconds)
        ratio = sdpa.median_ms / paged.median_ms
        coded_ratios = [figure.median_ms / paged.median_ms for figure in coded]
        shown.add_row(
            f"{case.num_sessions} x {case.num_rows}",
            str(case.context_len),
            f"{case.num_heads}/{case.num_kv_heads} x {case.head_dim}",
            f"{paged.median_ms:.3f}  ({paged.p20_ms:.3f}-{paged.p80_ms:.3f})",
            f"{sdpa.median_ms:.3f}  ({sdpa.p20_ms:.3f}-{sdpa.p80_ms:.3f})",
            f"{case.gigaflops / paged.median_ms * 1e3:.0f}",
            f"{ratio:.2f}",
            *(f"{coded_ratio:.2f}" for coded_ratio in coded_ratios),
        )
        records.append({"case": asdict(case), "paged": asdict(paged), "sdpa": asdict(sdpa), "ratio": ratio})
        records[-1] |= {name: asdict(figure) for name, figure in zip(CODE_DTYPES, coded, strict=True)}
    return records


def measure_layers(seconds: float) -> dict[str, object]:
    """Attention of all layers of a LAYER_CASE step, each with its own cache, and the step's linears."""
    layers = [paged_side(LAYER_CASE) for _ in range(NUM_LAYERS)]
    linears = linears_side(LAYER_CASE.num_sessions * LAYER_CASE.num_rows)
    attention_ms, linears_ms = take_turns([lambda: [layer() for layer in layers], linears], seconds)
    return {
        "case": asdict(LAYER_CASE),
        "num_layers": NUM_LAYERS,
        "paged": asdict(attention_ms),
        "linears": asdict(linears_ms),
        "ratio": linears_ms.median_ms / attention_ms.median_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--save", action="store_true", help="append to attention.jsonl")
    parser.add_argument("--seconds", type=float, default=1.5, help="per case")
    options = parser.parse_args()
    torch.manual_seed(0)
    title = f"bf16 attention of one layer, {torch.get_num_threads()} threads, ms: median (p20-p80)"
    columns = ("sessions x rows", "context", "heads x dim", "paged", "torch SDPA", "GFLOP/s", "SDPA / paged")
    shown = table(*columns, *(f"{name} / paged" for name in CODE_DTYPES), title=title)
    records = measure_cases(options.seconds, shown)
    layers = measure_layers(options.seconds * 4)
    console.print(shown)
    console.print(
        f"{NUM_LAYERS} layers, 16 sessions x 8 rows, 1,000 tokens of context: attention {layers['paged']}, "
        f"linears of a 150 M-parameter model {layers['linears']}: linears / attention {layers['ratio']:.2f}"
    )
    if options.save:
        save_rows("attention", [{"num_threads": torch.get_num_threads()} | record for record in [*records, layers]])


if __name__ == "__main__":
    main()
