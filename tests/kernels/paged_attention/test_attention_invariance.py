"""The law the exact mode stands on: a row's output bits do not depend on anything but what the row sees.

Each position of a session is computed alone, as one decode row, and must then come out with the same bits in
any chunking, batch, tree, block layout and thread count.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from outrider.kernels.paged_attention import cpu
from tests.kernels.paged_attention.paged_cases import Session, Shape, bits, chain, lay_out, random_session, run_kernel

LENGTH = 150
CASES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "fp32": (Shape(), {}),
    "fp32-group1": (Shape(num_kv_heads=4), {}),
    "bf16": (Shape(dtype=torch.bfloat16), {}),
    "bf16-group3-d80": (
        Shape(num_heads=3, num_kv_heads=1, head_dim=80, value_dim=80, dtype=torch.bfloat16),
        {},
    ),
    "bf16-window": (Shape(dtype=torch.bfloat16), {"sliding_window": 51}),
    "bf16-chunk-softcap": (
        Shape(num_heads=6, num_kv_heads=2, head_dim=48, value_dim=40, dtype=torch.bfloat16),
        {"chunk_size": 51, "softcap": 4.0, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0, 1.0, 2.0])},
    ),
    "latent": (Shape(num_heads=32, num_kv_heads=1, head_dim=40, value_dim=32, dtype=torch.bfloat16), {}),
    "int8": (Shape(code_dtype=torch.int8), {}),
    "int8-d128": (Shape(head_dim=128, value_dim=128, dtype=torch.bfloat16, code_dtype=torch.int8), {}),
    "fp8": (Shape(dtype=torch.bfloat16, code_dtype=torch.float8_e4m3fn), {}),
    "fp8-window-d80": (Shape(head_dim=80, value_dim=80, code_dtype=torch.float8_e4m3fn), {"sliding_window": 50}),
    "int8-chunk": (Shape(num_kv_heads=1, code_dtype=torch.int8), {"chunk_size": 50}),
    "window": (Shape(), {"sliding_window": 50}),
    "chunk": (Shape(), {"chunk_size": 50}),
    "softcap-sinks-odd": (
        Shape(head_dim=43, value_dim=21),
        {"softcap": 4.0, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    ),
}
each_case = pytest.mark.parametrize(("shape", "options"), CASES.values(), ids=CASES)


def attend(
    sessions: list[Session], shape: Shape, options: dict[str, Any], *, num_threads: int | None = None, **layout: int
) -> list[torch.Tensor]:
    arguments = lay_out(sessions, shape, **layout)
    # Freed memory is what the kernel's output is made of: a row that is not written must not look right.
    poison = torch.full((*arguments["query"].shape[:2], shape.value_dim), torch.nan, dtype=shape.dtype)
    del poison
    out = run_kernel(cpu.paged_attention, arguments, options, num_threads=num_threads)
    return list(out.split([session.num_rows for session in sessions]))


def decode_alone(whole: Session, shape: Shape, options: dict[str, Any]) -> torch.Tensor:
    rows = [attend([chain(whole, t, t + 1)], shape, options)[0] for t in range(whole.num_rows)]
    return torch.cat(rows)


@each_case
def test_chunks_and_batch_mates(shape: Shape, options: dict[str, Any]) -> None:
    whole = random_session(shape, 0, LENGTH, 1)
    expected = bits(decode_alone(whole, shape, options))
    rng = random.Random(2)
    for trial, num_rows in enumerate([LENGTH, 64, 63, 33, *range(1, 10)]):
        mates = [random_session(shape, rng.randrange(200), rng.randrange(6), 50 + i) for i in range(trial % 4)]
        for first in [*rng.sample(range(LENGTH), 3), 0, 60]:
            last = min(first + num_rows, LENGTH)
            place = rng.randrange(len(mates) + 1)
            batch = [*mates[:place], chain(whole, first, last), *mates[place:]]
            layout = {"block_size": rng.choice([4, 16, 64]), "seed": rng.randrange(100)}
            rows = attend(batch, shape, options, **layout)[place]
            assert torch.equal(bits(rows), expected[first:last]), (first, last, layout)


def hidden_in_tree(whole: Session, first: int, last: int, num_chain: int, seed: int) -> tuple[Session, list[int]]:
    """Positions [first, last) with the part after num_chain rows as a path of a bushy tree.

    Returns the session and the rows on which the positions stand; the other rows are strangers.
    """
    rng = random.Random(seed)
    rows: list[int | None] = [*range(first, first + num_chain)]
    parents = [*range(-1, num_chain - 1)]
    path = list(range(num_chain))
    for position in range(first + num_chain, last):
        for _ in range(rng.randrange(4)):
            parents.append(rng.randrange(num_chain - 1, len(rows)) if rows else -1)
            rows.append(None)
        parents.append(path[-1] if path else -1)
        path.append(len(rows))
        rows.append(position)

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape[1:], generator=torch.Generator().manual_seed(seed)).to(tensor.dtype)
        return torch.stack([noise if row is None else tensor[row] for row in rows])

    session = dataclasses.replace(
        whole,
        queries=gather(whole.queries),
        keys=torch.cat([whole.keys[:first], gather(whole.keys)]),
        values=torch.cat([whole.values[:first], gather(whole.values)]),
        tree_start=num_chain,
        parents=tuple(parents),
    )
    return session, path


@each_case
def test_trees(shape: Shape, options: dict[str, Any]) -> None:
    whole = random_session(shape, 0, LENGTH, 3)
    expected = bits(decode_alone(whole, shape, options))
    mate = random_session(shape, 70, 20, 4, tree_start=1)
    places = [(0, 6, 0), (0, 12, 1), (20, 26, 1), (60, 70, 1), (63, 66, 1), (64, 70, 2), (125, 150, 1), (50, 130, 3)]
    for seed, (first, last, num_chain) in enumerate(places):
        session, path = hidden_in_tree(whole, first, last, num_chain, seed)
        rows = attend([mate, session], shape, options, seed=seed)[1]
        assert torch.equal(bits(rows)[path], expected[first:last]), (first, last, num_chain)


LONG: dict[str, tuple[Shape, dict[str, Any]]] = {
    "fp32-sinks": (Shape(), {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])}),
    "bf16": (Shape(num_heads=9, num_kv_heads=3, dtype=torch.bfloat16), {}),
    "bf16-window-sinks": (
        Shape(dtype=torch.bfloat16),
        {"sliding_window": 551, "sinks": torch.tensor([9.0, -1.0, 3.0, 0.0])},
    ),
    "int8-chunk": (Shape(code_dtype=torch.int8), {"chunk_size": 700}),
}


@pytest.mark.parametrize(("shape", "options"), LONG.values(), ids=LONG)
def test_splits_of_the_context(shape: Shape, options: dict[str, Any]) -> None:
    """About the borders of splits: rows alone on one thread, in chunks, among others, in trees, divided for threads."""
    whole = random_session(shape, 0, 1560, 11)
    mate = random_session(shape, 300, 4, 12)
    for first, last in ((505, 520), (1010, 1050), (1530, 1550)):
        rows = [attend([chain(whole, t, t + 1)], shape, options, num_threads=1)[0] for t in range(first, last)]
        expected = bits(torch.cat(rows))
        for num_threads in (1, 2, 5):
            for batch, place in (([chain(whole, first, last)], 0), ([mate, chain(whole, first, last), mate, mate], 1)):
                found = attend(batch, shape, options, num_threads=num_threads)[place]
                assert torch.equal(bits(found), expected), (first, num_threads, place)
            alone = attend([chain(whole, last - 1, last)], shape, options, num_threads=num_threads)[0]
            assert torch.equal(bits(alone), expected[-1:])
            session, path = hidden_in_tree(whole, first, last, 3, first)
            found = attend([session], shape, options, num_threads=num_threads)[0]
            assert torch.equal(bits(found)[path], expected), (first, num_threads)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unseen_rows_cannot_spoil_a_row(poison: float, dtype: torch.dtype) -> None:
    shape = Shape(dtype=dtype)
    clean = random_session(shape, 0, 70, 5)
    expected = bits(attend([chain(clean, 55, 70)], shape, {})[0])
    keys, values, queries = clean.keys.clone(), clean.values.clone(), clean.queries.clone()
    keys[62], values[62], queries[66] = poison, poison, poison
    spoilt = dataclasses.replace(clean, keys=keys, values=values, queries=queries)
    arguments = lay_out([chain(spoilt, 55, 70)], shape)
    rows = run_kernel(cpu.paged_attention, arguments)
    assert torch.equal(bits(rows[:7]), expected[:7])
    assert rows[7:].isnan().all(dim=-1).any()
    # In a tree: the spoilt row is a sibling of the others, not their ancestor.
    tree = dataclasses.replace(chain(spoilt, 55, 70), tree_start=1, parents=(-1,) + (0,) * 14)
    clean_tree = dataclasses.replace(chain(clean, 55, 70), tree_start=1, parents=(-1,) + (0,) * 14)
    spoilt_rows = run_kernel(cpu.paged_attention, lay_out([tree], shape))
    clean_rows = bits(attend([clean_tree], shape, {})[0])
    untouched = [row for row in range(15) if row not in (7, 11)]
    assert torch.equal(bits(spoilt_rows[untouched]), clean_rows[untouched])
