"""GPU attention against the fp64 reference, and its rows bit for bit in whatever company; interpreted without a GPU.

On a GPU the same tests run on larger shapes: the interpreter takes 0.1 s for a block of positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.kv_codes.layout import is_coded, parts_of
from outrider.kernels.paged_attention import reference
from outrider.kernels.paged_attention import triton as on_gpu
from tests.kernels.paged_attention.paged_cases import (
    OPTIONS,
    Session,
    Shape,
    bits,
    chain,
    empty_codes,
    lay_out,
    random_session,
    run_kernel,
)
from tests.kernels.triton_device import device

pytestmark = pytest.mark.gpu

ON_GPU = device().type == "cuda"
BF16 = torch.bfloat16
SHAPES = {
    "fp32-group2": Shape(2, 1, 64, 64),
    "fp32-group1": Shape(2, 2, 16, 16),
    "bf16-group4": Shape(4, 1, 128, 128, BF16),
    "bf16-group3-d80": Shape(3, 1, 80, 80, BF16),
    "bf16-group8": Shape(8, 1, 64, 64, BF16),
    "bf16-odd-dims": Shape(4, 2, 43, 21, BF16),
    "bf16-d256": Shape(2, 1, 256, 256, BF16),
    "int8": Shape(2, 1, 64, 64, code_dtype=torch.int8),
    "int8-bf16-group4": Shape(4, 1, 128, 128, BF16, torch.int8),
    "fp8-odd-dims": Shape(4, 2, 43, 21, code_dtype=torch.float8_e4m3fn),
    "fp8-bf16-odd-dims": Shape(4, 2, 43, 21, BF16, torch.float8_e4m3fn),
}
CASES = [(name, "plain") for name in SHAPES if name != "fp32-group2"]
CASES += [("fp32-group2", name) for name in OPTIONS] + [("bf16-odd-dims", "all")]
CASES += [("int8", "all"), ("fp8-bf16-odd-dims", "chunk37")]
if ON_GPU:  # a Llama's of 8 billion parameters
    SHAPES |= {"fp32-llama-8b": Shape(32, 8, 128, 128), "bf16-llama-8b": Shape(32, 8, 128, 128, BF16)}
    CASES += [(name, options) for name in ("fp32-llama-8b", "bf16-llama-8b") for options in OPTIONS]


def ragged_sessions(shape: Shape) -> list[Session]:
    """An empty context, a session without rows, block boundaries, chains, a tree, both."""
    cases: list[tuple[int, int, int | None]] = [(0, 1, None), (20, 0, None), (63, 3, None), (29, 5, 2), (0, 4, 0)]
    if ON_GPU:
        cases += [
            (c, n, None) for c, n in [(15, 1), (64, 1), (130, 9), (511, 2), (512, 1), (1500, 8), (700, 300), (4000, 8)]
        ]
        cases += [(c, n, t) for c, n, t in [(5, 9, 1), (61, 12, 2), (70, 40, 1), (505, 30, 3), (1023, 8, 0)]]
    return [random_session(shape, context, rows, seed, tree) for seed, (context, rows, tree) in enumerate(cases)]


def place(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: moved(value) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def moved(tensor: torch.Tensor) -> torch.Tensor:
    if not is_coded(tensor):
        return tensor.to(device())
    # `to` would leave the scales behind: they lie outside of the tensor of codes.
    there = empty_codes(tensor.shape, tensor.dtype, device())
    for target, source in zip(parts_of(there), parts_of(tensor), strict=True):
        target.copy_(source)
    return there


def attend(sessions: list[Session], shape: Shape, options: dict[str, Any], **layout: int) -> list[torch.Tensor]:
    arguments = place(lay_out(sessions, shape, **layout))
    # Freed memory is what the kernel's output is made of: a row that is not written must not look right.
    poison = torch.full((*arguments["query"].shape[:2], shape.value_dim), torch.nan, dtype=shape.dtype, device=device())
    del poison
    out = run_kernel(on_gpu.paged_attention, arguments, place(options))
    return list(out.split([session.num_rows for session in sessions]))


def assert_matches_reference(arguments: dict[str, Any], **options: Any) -> None:
    arguments, options = place(arguments), place(options)
    out = run_kernel(on_gpu.paged_attention, arguments, options)
    expected = run_kernel(reference.paged_attention, arguments | {"query": arguments["query"].double()}, options)
    assert out.dtype == arguments["query"].dtype
    # In bf16 the weights are rounded too, to 8 bits, before they meet the values.
    is_bf16 = out.dtype == BF16
    torch.testing.assert_close(out.double(), expected, rtol=2.0**-8 if is_bf16 else 0, atol=1e-2 if is_bf16 else 1e-5)


@pytest.mark.parametrize(("shape_name", "options_name"), CASES)
def test_agrees_with_reference(shape_name: str, options_name: str) -> None:
    shape, options = SHAPES[shape_name], dict(OPTIONS[options_name])
    if "sinks" in options:
        options["sinks"] = torch.randn(shape.num_heads, generator=torch.Generator().manual_seed(5)) * 3
    assert_matches_reference(lay_out(ragged_sessions(shape), shape), **options)


@pytest.mark.parametrize("sink", [-torch.inf, 1e4])
def test_extreme_sinks(sink: float) -> None:
    shape = SHAPES["fp32-group1"]
    assert_matches_reference(lay_out([random_session(shape, 9, 2, 1)], shape), sinks=torch.full((2,), sink))


@pytest.mark.parametrize("block_size", [1, 5, 128])
def test_any_block_size_strided_and_of_two_dtypes(block_size: int) -> None:
    shape = dataclasses.replace(SHAPES["fp32-group2"], dtype=BF16)
    arguments = lay_out([random_session(shape, 40, 3, 1), random_session(shape, 3, 2, 2)], shape, block_size)
    wide = torch.full((5, 6, 128), torch.nan)
    wide[:, 2:4, 64:] = arguments["query"]
    caches = torch.stack([arguments["key_cache"], arguments["value_cache"]], dim=3)
    arguments |= {"query": wide[:, 2:4, 64:], "key_cache": caches[:, :, :, 0], "value_cache": caches[:, :, :, 1]}
    assert_matches_reference(arguments)


def test_padding_and_nothing_at_all() -> None:
    shape = SHAPES["fp32-group2"]
    real, empty = random_session(shape, 18, 3, 1), random_session(shape, 0, 0, 2)
    arguments = lay_out([real, empty], shape)
    expected = attend([real], shape, {})[0]
    padded = arguments | {
        "query": torch.cat([arguments["query"], torch.full((9, 2, 64), torch.nan)]),
        "parents": torch.cat([arguments["parents"], torch.full((9,), 7, dtype=torch.int32)]),
    }
    assert torch.equal(bits(run_kernel(on_gpu.paged_attention, place(padded))[:3]), bits(expected))
    assert run_kernel(on_gpu.paged_attention, place(lay_out([], shape))).shape == (0, 2, 64)
    assert run_kernel(on_gpu.paged_attention, place(lay_out([empty], shape))).shape == (0, 2, 64)


LAWS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "fp32": (SHAPES["fp32-group2"], {}),
    "fp32-window": (SHAPES["fp32-group2"], {"sliding_window": 40}),
    "fp32-chunk": (SHAPES["fp32-group2"], {"chunk_size": 27}),
    "bf16": (SHAPES["bf16-group4"], {}),
    "int8-bf16": (SHAPES["int8-bf16-group4"], {}),
    "fp8-window": (SHAPES["fp8-odd-dims"], {"sliding_window": 40}),
    "all": (SHAPES["bf16-odd-dims"], {"sliding_window": 21, "softcap": 4.0, "sinks": torch.tensor([0.5, -1, 3, 0])}),
}
if ON_GPU:
    LAWS |= {
        name: (dataclasses.replace(shape, num_heads=2 * shape.num_heads, num_kv_heads=2 * shape.num_kv_heads), {})
        for name, shape in SHAPES.items()
    }
    LAWS["bf16-window"] = (SHAPES["bf16-group4"], {"sliding_window": 600})
    LAWS["bf16-chunk"] = (SHAPES["bf16-group4"], {"chunk_size": 600})
each_law = pytest.mark.parametrize(("shape", "options"), LAWS.values(), ids=LAWS)
LENGTH = 1300 if ON_GPU else 70


def decode_alone(whole: Session, position: int, shape: Shape, options: dict[str, Any]) -> torch.Tensor:
    return bits(attend([chain(whole, position, position + 1)], shape, options)[0])


@each_law
def test_rows_alone_chunked_and_among_others(shape: Shape, options: dict[str, Any]) -> None:
    whole = random_session(shape, 0, LENGTH, 1)
    prefill = bits(attend([chain(whole, 0, LENGTH)], shape, options)[0])
    mates = [random_session(shape, 33, 2, 7, tree_start=0), random_session(shape, 0, 5, 8)]
    verify = bits(attend([mates[0], chain(whole, 60, 69), mates[1]], shape, options, seed=3)[1])
    assert torch.equal(verify, prefill[60:69])
    for position in [0, 31, 62, 64, 69, *range(500, LENGTH, 37)]:
        assert torch.equal(decode_alone(whole, position, shape, options)[0], prefill[position]), position


def bushy(whole: Session, first: int, last: int, num_chain: int) -> Session:
    """Positions [first, last), after num_chain rows each with a stranger before it that hangs below its parent.

    Position first + num_chain + i stands in row num_chain + 2 * i + 1.
    """
    rows, parents = list(range(first, first + num_chain)), list(range(-1, num_chain - 1))
    for position in range(first + num_chain, last):
        parent = len(rows) - 1
        rows += [0, position]
        parents += [parent, parent]
    part = chain(whole, 0, last)
    order = torch.tensor(rows)
    return dataclasses.replace(
        part,
        queries=part.queries[order],
        keys=torch.cat([part.keys[:first], part.keys[order]]),
        values=torch.cat([part.values[:first], part.values[order]]),
        tree_start=num_chain,
        parents=tuple(parents),
    )


@each_law
def test_a_path_of_a_tree_is_a_chain(shape: Shape, options: dict[str, Any]) -> None:
    whole = random_session(shape, 0, LENGTH, 3)
    cases = [(60, 67, 1), (0, 3, 0)] + ([(505, 520, 2), (1000, 1040, 1), (1022, 1030, 0)] if ON_GPU else [])
    for first, last, num_chain in cases:
        mate = random_session(shape, 9, 4, 4, tree_start=1)
        rows = bits(attend([mate, bushy(whole, first, last, num_chain)], shape, options)[1])
        expected = bits(attend([chain(whole, first, last)], shape, options)[0])
        assert torch.equal(rows[:num_chain], expected[:num_chain])
        assert torch.equal(rows[num_chain + 1 :: 2], expected[num_chain:]), (first, last)


IN_SPLITS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 530, "sinks": torch.tensor([1.0, -2.0])},
    {"chunk_size": 600},
    {"chunk_size": 1071},  # begins with the tree
]


@pytest.mark.parametrize("options", IN_SPLITS)
def test_splits_and_wide_tables_change_no_bit(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(2, 1, 16, 16, BF16)
    sessions = [random_session(shape, 1070, 3, 1, tree_start=1), random_session(shape, 30, 2, 2)]
    arguments = lay_out(sessions, shape)
    assert_matches_reference(arguments, **options)
    in_splits = run_kernel(on_gpu.paged_attention, place(arguments), place(options))
    short = run_kernel(on_gpu.paged_attention, place(lay_out(sessions[1:], shape)), place(options))
    assert torch.equal(bits(in_splits[3:]), bits(short)), "one split, written at once"
    monkeypatch.setattr(on_gpu, "MAX_SPLIT_PROGRAMS", 2)
    wide = torch.nn.functional.pad(arguments["block_tables"], (0, 70), value=-1)
    out = run_kernel(on_gpu.paged_attention, place(arguments | {"block_tables": wide}), place(options))
    assert torch.equal(bits(out), bits(in_splits))
    monkeypatch.setattr(on_gpu, "MAX_PART_BYTES", 0)
    out = run_kernel(on_gpu.paged_attention, place(arguments), place(options))
    assert torch.equal(bits(out), bits(in_splits))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(8, 2, 64, dtype=torch.float16)}, "bfloat16 or float32"),
        ({"query": torch.zeros(8, 2, 32)}, "does not fit"),
        ({"query": torch.zeros(8, 64, 2).transpose(1, 2)}, "contiguous"),
        ({"value_cache": torch.zeros(1, 1, 16, 64)}, "must agree"),
        ({"context_lens": torch.tensor([10])}, "int32"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"softcap": -1.0}, "softcap"),
        ({"sinks": torch.zeros(3)}, "sinks"),
    ],
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    shape = SHAPES["fp32-group2"]
    arguments = lay_out([random_session(shape, 60, 8, 1, tree_start=2)], shape)
    with pytest.raises(KernelArgumentError, match=message):
        run_kernel(on_gpu.paged_attention, place(arguments | change))
