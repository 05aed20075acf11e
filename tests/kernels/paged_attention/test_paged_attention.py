"""CPU attention against the fp64 reference: every feature, every odd size, and what it must refuse."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.paged_attention import cpu, reference
from tests.kernels.paged_attention.paged_cases import OPTIONS, Session, Shape, lay_out, random_session, run_kernel

SHAPES = {
    "group1": Shape(num_heads=2, num_kv_heads=2),
    "group3": Shape(num_heads=9, num_kv_heads=3),
    "group4-d16": Shape(num_heads=4, num_kv_heads=1, head_dim=16, value_dim=16),
    "group8-d80": Shape(num_heads=8, num_kv_heads=1, head_dim=80, value_dim=80),
    "d128": Shape(num_heads=2, num_kv_heads=1, head_dim=128, value_dim=128),
    "d256": Shape(num_heads=2, num_kv_heads=1, head_dim=256, value_dim=256),
    "odd-dims": Shape(num_heads=2, num_kv_heads=1, head_dim=43, value_dim=21),
    "latent": Shape(num_heads=48, num_kv_heads=1, head_dim=96, value_dim=80),
    "bf16": Shape(dtype=torch.bfloat16),
    "bf16-odd-dims": Shape(head_dim=43, value_dim=21, dtype=torch.bfloat16),
    "int8": Shape(code_dtype=torch.int8),
    "int8-d128": Shape(num_heads=8, num_kv_heads=2, head_dim=128, value_dim=128, code_dtype=torch.int8),
    "int8-bf16-odd-dims": Shape(head_dim=43, value_dim=21, dtype=torch.bfloat16, code_dtype=torch.int8),
    "fp8": Shape(code_dtype=torch.float8_e4m3fn),
    "fp8-d80": Shape(num_heads=8, num_kv_heads=1, head_dim=80, value_dim=80, code_dtype=torch.float8_e4m3fn),
    "fp8-bf16-odd-dims": Shape(head_dim=43, value_dim=21, dtype=torch.bfloat16, code_dtype=torch.float8_e4m3fn),
}
CODED = ("int8", "fp8-bf16-odd-dims")


def ragged_sessions(shape: Shape) -> list[Session]:
    """Empty contexts, one token, tile and block boundaries, a session without rows, chains, trees, both."""
    plain = [(0, 1), (0, 3), (15, 1), (16, 2), (63, 3), (64, 1), (130, 9), (20, 0), (40, 70)]
    trees = [(0, 6, 0), (5, 9, 1), (61, 12, 2), (70, 40, 1), (128, 5, 4), (30, 5, 0)]
    return [random_session(shape, context, rows, seed) for seed, (context, rows) in enumerate(plain)] + [
        random_session(shape, context, rows, 100 + seed, start) for seed, (context, rows, start) in enumerate(trees)
    ]


def assert_matches_reference(arguments: dict[str, Any], *, num_threads: int | None = None, **options: Any) -> None:
    out = run_kernel(cpu.paged_attention, arguments, options, num_threads=num_threads)
    expected = run_kernel(reference.paged_attention, arguments | {"query": arguments["query"].double()}, options)
    assert out.dtype == arguments["query"].dtype
    rounding = 2.0**-8 if out.dtype == torch.bfloat16 else 0.0
    allowed = 2 * rounding * expected.abs() + 1e-5
    if out.dtype == arguments["value_cache"].dtype:  # weights are rounded too, each by at most this share
        of_sizes = arguments | {"query": arguments["query"].double(), "value_cache": arguments["value_cache"].abs()}
        allowed += rounding * run_kernel(reference.paged_attention, of_sizes, options)
    assert ((out.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize(
    ("shape_name", "options_name"),
    [(name, "plain") for name in SHAPES]
    + [("group3", name) for name in OPTIONS if name != "plain"]
    + [("bf16-odd-dims", "all"), ("group8-d80", "all"), ("bf16-odd-dims", "all-chunked")]
    + [(name, options) for name in CODED for options in OPTIONS if options != "plain"],
)
def test_agrees_with_reference(shape_name: str, options_name: str) -> None:
    shape, options = SHAPES[shape_name], dict(OPTIONS[options_name])
    if "sinks" in options:
        options["sinks"] = torch.randn(shape.num_heads, generator=torch.Generator().manual_seed(5)) * 3
    assert_matches_reference(lay_out(ragged_sessions(shape), shape), **options)


def test_a_cpu_without_products_of_pairs_computes_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_dot_pairs", lambda: False)
    shape = SHAPES["bf16"]
    arguments = lay_out(ragged_sessions(shape), shape)
    widened = arguments | {name: arguments[name].float() for name in ("query", "key_cache", "value_cache")}
    out = run_kernel(cpu.paged_attention, arguments)
    assert torch.equal(out, run_kernel(cpu.paged_attention, widened).to(torch.bfloat16))


@pytest.mark.parametrize("options_name", ["plain", "sinks", "window"])
@pytest.mark.parametrize("shape_name", ["group3", "bf16-odd-dims", "int8"])
@pytest.mark.parametrize("num_threads", [1, 4])
def test_contexts_of_several_splits(shape_name: str, options_name: str, num_threads: int) -> None:
    shape = SHAPES[shape_name]
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "sinks": {"sinks": torch.linspace(-2, 6, shape.num_heads)},
        "window": {"sliding_window": 600},
    }
    for session in (random_session(shape, 1535, 3, 1), random_session(shape, 1020, 9, 2, 3)):
        arguments = lay_out([session], shape)
        assert_matches_reference(arguments, num_threads=num_threads, **options[options_name])


@pytest.mark.parametrize("block_size", [1, 5, 32, 100])
@pytest.mark.parametrize("code_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_any_block_size(block_size: int, code_dtype: torch.dtype | None) -> None:
    shape = Shape(head_dim=43, value_dim=64, code_dtype=code_dtype)
    assert_matches_reference(lay_out(ragged_sessions(shape), shape, block_size))


def test_agrees_with_torch_attention() -> None:
    shape = Shape(num_heads=6, num_kv_heads=2)
    session = random_session(shape, 90, 7, 1)
    mask = torch.ones(97, 97, dtype=torch.bool).tril()[90:]
    expected = torch.nn.functional.scaled_dot_product_attention(
        session.queries.transpose(0, 1),
        session.keys.transpose(0, 1),
        session.values.transpose(0, 1),
        attn_mask=mask,
        enable_gqa=True,
    )
    out = run_kernel(cpu.paged_attention, lay_out([session], shape))
    torch.testing.assert_close(out, expected.transpose(0, 1), rtol=0, atol=2e-6)


def test_no_rows_at_all() -> None:
    shape = Shape()
    assert run_kernel(cpu.paged_attention, lay_out([], shape)).shape == (0, 4, 64)
    assert run_kernel(cpu.paged_attention, lay_out([random_session(shape, 9, 0, 1)], shape)).shape == (0, 4, 64)


def test_large_scores_do_not_overflow() -> None:
    shape = Shape()
    session = random_session(shape, 100, 3, 1)
    arguments = lay_out([session], shape)
    arguments["query"] = arguments["query"] * 1000
    assert_matches_reference(arguments)


@pytest.mark.parametrize("sink", [-torch.inf, 1e4])
def test_extreme_sinks(sink: float) -> None:
    shape = Shape()
    assert_matches_reference(lay_out(ragged_sessions(shape), shape), sinks=torch.full((4,), sink))


def test_strided_query_and_cache() -> None:
    shape = Shape()
    arguments = lay_out(ragged_sessions(shape), shape)
    wide = torch.full((arguments["query"].shape[0], 8, 128), torch.nan)
    wide[:, 2:6, 64:] = arguments["query"]
    caches = torch.stack([arguments["key_cache"], arguments["value_cache"]], dim=3)
    arguments |= {"query": wide[:, 2:6, 64:], "key_cache": caches[:, :, :, 0], "value_cache": caches[:, :, :, 1]}
    assert_matches_reference(arguments)


def test_values_may_be_a_part_of_the_keys() -> None:
    """And each of many heads over one key has the bits that it has alone."""
    shape = Shape(num_heads=32, num_kv_heads=1, head_dim=96, value_dim=80, dtype=torch.bfloat16)
    arguments = lay_out(ragged_sessions(shape), shape)
    arguments["value_cache"] = arguments["key_cache"][..., :80]
    assert_matches_reference(arguments)
    out = run_kernel(cpu.paged_attention, arguments)
    for head in (0, 15, 16, 31):
        alone = run_kernel(cpu.paged_attention, arguments | {"query": arguments["query"][:, head : head + 1]})
        assert torch.equal(out[:, head : head + 1], alone)


@pytest.mark.parametrize(("num_heads", "num_parts"), [(16, 1), (128, 8), (40, 4), (71, 1), (24, 2)])
def test_heads_over_one_key_are_work_for_several_threads(num_heads: int, num_parts: int) -> None:
    """One row is an item per part of its heads; heads that do not divide stay together."""
    shape = Shape(num_heads=num_heads, num_kv_heads=1)
    plans: dict[Any, Any] = {}
    run_kernel(cpu.paged_attention, lay_out([random_session(shape, 9, 1, 1)], shape), plans=plans)
    assert [plan.num_items for plan in plans.values()] == [num_parts]


def test_fp32_queries_on_a_bf16_cache() -> None:
    shape = Shape(dtype=torch.bfloat16)
    arguments = lay_out(ragged_sessions(shape), shape)
    assert_matches_reference(arguments | {"query": arguments["query"].float()})


@pytest.mark.parametrize("team", [cpu_team.run_on_openmp, cpu_team.run_on_python_threads])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_change_no_bit(team: cpu_team.ThreadTeam, num_threads: int) -> None:
    shape = Shape()
    arguments = lay_out(ragged_sessions(shape), shape)
    alone = run_kernel(cpu.paged_attention, arguments, num_threads=1)
    assert torch.equal(run_kernel(cpu.paged_attention, arguments, num_threads=num_threads, team=team), alone)


def test_concurrent_callers() -> None:
    shape = Shape()
    cases = [lay_out([random_session(shape, 300 + 50 * i, 4, i)], shape) for i in range(4)]
    expected = [run_kernel(cpu.paged_attention, case) for case in cases]
    wrong: list[int] = []

    def call(index: int) -> None:
        for _ in range(20):
            if not torch.equal(run_kernel(cpu.paged_attention, cases[index]), expected[index]):
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(cases))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(8, 4, 64, dtype=torch.float16)}, "float16"),
        ({"key_cache": torch.zeros(8, 2, 16, 64, dtype=torch.float16)}, "float16"),
        ({name: torch.zeros(8, 2, 16, 64, dtype=torch.int8) for name in ("key_cache", "value_cache")}, "no scales"),
        ({"query": torch.zeros(8, 3, 64)}, "does not fit"),
        ({"query": torch.zeros(8, 4, 32)}, "does not fit"),
        ({"query": torch.zeros(8, 64, 4).transpose(1, 2)}, "contiguous"),
        ({"value_cache": torch.zeros(1, 2, 16, 64)}, "must agree"),
        ({"block_tables": torch.full((1, 5), 99, dtype=torch.int32)}, "outside the cache"),
        ({"block_tables": torch.full((1, 5), -1, dtype=torch.int32)}, "outside the cache"),
        ({"block_tables": torch.zeros((1, 1), dtype=torch.int32)}, "do not fit"),
        ({"context_lens": torch.tensor([10])}, "int32"),
        ({"context_lens": torch.tensor([-1], dtype=torch.int32)}, "not be negative"),
        ({"query_starts": torch.tensor([0, 7], dtype=torch.int32)}, "ascend"),
        ({"parents": torch.tensor([0, 0, 0, 5, 3, 4, 5, 6], dtype=torch.int32)}, "not an earlier row"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"chunk_size": 8, "sliding_window": 8}, "exclude each other"),
        ({"softcap": -1.0}, "softcap"),
        ({"sinks": torch.zeros(3)}, "sinks"),
    ],
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    shape = Shape()
    arguments = lay_out([random_session(shape, 60, 8, 1, tree_start=2)], shape)
    with pytest.raises(KernelArgumentError, match=message):
        run_kernel(cpu.paged_attention, arguments | change)
