"""The recurrences on the CPU: close to plain torch, and one set of bits for all divisions, threads and repetitions."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.recurrent import cpu
from outrider.kernels.recurrent.gated_delta import reference as gated_delta_reference
from outrider.kernels.recurrent.mamba1 import reference as mamba1_reference
from outrider.kernels.recurrent.mamba2 import reference as mamba2_reference
from outrider.kernels.recurrent.rows import RecurrentRows
from outrider.kernels.recurrent.short_conv import cpu as short_conv
from outrider.kernels.recurrent.short_conv import reference as short_conv_reference
from tests.kernels.recurrent import recurrent_layers as layers
from tests.kernels.recurrent.recurrent_cases import NUM_LOG_ROWS, Part, committed, drafted_trees, outputs, ways

BUILDERS = {
    "kimi_delta": (layers.kimi_delta_case, cpu.gated_delta, gated_delta_reference.gated_delta),
    "ling_delta": (layers.ling_delta_case, cpu.gated_delta, gated_delta_reference.gated_delta),
    "mamba1": (layers.mamba1_case, cpu.mamba1, mamba1_reference.mamba1),
    "mamba2": (layers.mamba2_case, cpu.mamba2, mamba2_reference.mamba2),
    "short_conv": (layers.short_conv_case, short_conv.short_conv, short_conv_reference.short_conv),
}
_NUM_SLOTS = 8  # of recurrent_cases
DTYPES = [torch.float32, torch.bfloat16]


def whole(case: layers.Case) -> torch.Tensor:
    return outputs(case.driver(), [committed(case.inputs(2))])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BUILDERS)
def test_every_division_into_calls_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    build, kernel, _ = BUILDERS[name]
    case = build(kernel, dtype)
    rows, noise = case.inputs(2), case.inputs(3, layers.NUM_ROWS + 4)
    expected = outputs(case.driver(), [committed(rows)])
    assert bool(expected.isfinite().all())
    strangers = [case.inputs(10 + count, count) for count in (1, 2, 5)]
    for way, parts in ways(rows, noise).items():
        assert torch.equal(outputs(case.driver(), parts), expected), way
        assert torch.equal(outputs(case.driver(), parts, strangers, place=2), expected), f"{way} in company"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BUILDERS)
def test_rows_match_the_reference(name: str, dtype: torch.dtype) -> None:
    build, kernel, reference = BUILDERS[name]
    found, expected = (whole(build(each, dtype)) for each in (kernel, reference))
    if name == "short_conv":
        assert torch.equal(found, expected)
    elif dtype == torch.float32:
        # Sums in another order, exp and its kin within 3 units in the last place, over 40 rows.
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    else:
        # That turns a rounding now and then, and what was rounded otherwise goes on.
        torch.testing.assert_close(found, expected, atol=0.05, rtol=2**-6)
        assert (found == expected).float().mean() > 0.9


@pytest.mark.parametrize("name", BUILDERS)
def test_a_call_may_be_repeated(name: str) -> None:
    build, kernel, _ = BUILDERS[name]
    case = build(kernel, torch.float32)

    def twice(*arguments: object) -> torch.Tensor:
        case.call(*arguments)
        return case.call(*arguments)

    repeated = dataclasses.replace(case, call=twice)
    trees = drafted_trees(case.inputs(2), case.inputs(3, layers.NUM_ROWS + 4))
    assert torch.equal(outputs(repeated.driver(), trees), whole(case))


@pytest.mark.parametrize("head_dim", [16, 72])
def test_several_threads_and_tiles_give_the_same_bits(head_dim: int) -> None:
    layer = layers.gated_delta_layer(torch.float32, key_dim=4 * head_dim, value_dim=head_dim)
    case = layers.gated_delta_case(cpu.gated_delta, torch.float32, layer)
    expected = whole(case)
    reference = layers.gated_delta_case(gated_delta_reference.gated_delta, torch.float32, layer)
    torch.testing.assert_close(expected, whole(reference), atol=1e-5, rtol=1e-5)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        strangers = [case.inputs(10 + count, count) for count in (1, 2, 3, 5)]
        trees = drafted_trees(case.inputs(2), case.inputs(3, layers.NUM_ROWS + 4))
        found = outputs(case.driver(), trees, strangers, place=1)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, expected)


def test_a_draft_may_fill_the_log() -> None:
    case = layers.mamba2_case(cpu.mamba2, torch.float32)
    rows, noise = case.inputs(2), case.inputs(3, NUM_LOG_ROWS)
    full = Part(rows[:1], torch.cat([rows[1:3], noise[3:]]), accepted=(0, 1))
    assert len(full.draft) == NUM_LOG_ROWS - 1
    assert torch.equal(outputs(case.driver(), [full, committed(rows[3:])]), whole(case))


def _rows(**changes: list[int]) -> RecurrentRows:
    """One fresh session of three chain rows and a draft of two, with changes."""
    numbers = {
        "row_starts": [0, 5],
        "num_chain_rows": [3],
        "parents": [-1, 0, 1, 2, 2],
        "slots_in": [-1],
        "num_kept": [0],
        "slots_out": [0],
        "sessions": [0] * 5,
        **changes,
    }
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in numbers.items()}
    return RecurrentRows(**{"kept_rows": torch.zeros(1, 1, dtype=torch.int32), **tensors})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots_out": [_NUM_SLOTS]}, "outside the states"),
        ({"slots_in": [_NUM_SLOTS]}, "outside the states"),
        ({"slots_in": [1], "num_kept": [1], "kept_rows": [[NUM_LOG_ROWS]]}, "outside the states"),
        ({"num_chain_rows": [0]}, "no chain row"),
        ({"num_chain_rows": [6]}, "no chain row"),
        ({"parents": [-1, 0, 1, 2, 4]}, "no earlier row"),
        ({"parents": [-1, 0, 0, 2, 2]}, "no earlier row"),
        ({"parents": [-1, 0, 1, 2, 1]}, "no earlier row"),
    ],
)
@pytest.mark.parametrize("name", BUILDERS)
def test_impossible_rows_are_refused(name: str, changes: dict[str, list[int]], message: str) -> None:
    build, kernel, _ = BUILDERS[name]
    case = build(kernel, torch.float32)
    case.call(case.inputs(0, 5), case.states(), _rows())
    with pytest.raises(KernelArgumentError, match=message):
        case.call(case.inputs(0, 5), case.states(), _rows(**changes))


def test_a_draft_longer_than_the_log_is_refused() -> None:
    case = layers.short_conv_case(short_conv.short_conv, torch.float32)
    num_rows = NUM_LOG_ROWS + 1
    rows = _rows(row_starts=[0, num_rows], num_chain_rows=[1], parents=[*range(-1, num_rows - 1)])
    with pytest.raises(KernelArgumentError, match="more drafts than its log"):
        case.call(case.inputs(0, num_rows), case.states(), rows)


@pytest.mark.parametrize("name", BUILDERS)
def test_what_does_not_fit_is_refused(name: str) -> None:
    build, kernel, _ = BUILDERS[name]
    case = build(kernel, torch.float32)
    with pytest.raises(KernelArgumentError, match="do not fit"):
        case.call(case.inputs(0, 5), dataclasses.replace(case, num_channels=20).states(), _rows())
    with pytest.raises(KernelArgumentError, match="not both bf16 or float32"):
        case.call(case.inputs(0, 5), dataclasses.replace(case, dtype=torch.bfloat16).states(), _rows())
