"""The recurrences of the GPU, interpreted where there is none: near plain torch, whose convolutions are equal, and one
set of bits for all divisions into calls. Tiny: an interpreted row of a head takes some milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from outrider.engine.recurrent.rows import StateRows, recurrent_rows
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.recurrent.gated_delta import reference as gated_delta_reference
from outrider.kernels.recurrent.gated_norm import reference as gated_norm_reference
from outrider.kernels.recurrent.gated_norm.arguments import ACTIVATIONS, GatedNormLayer
from outrider.kernels.recurrent.gated_norm.triton import gated_norm as device_gated_norm
from outrider.kernels.recurrent.mamba1 import reference as mamba1_reference
from outrider.kernels.recurrent.mamba2 import reference as mamba2_reference
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from outrider.kernels.recurrent.short_conv import reference as short_conv_reference
from outrider.kernels.recurrent.short_conv.triton import short_conv as device_short_conv
from outrider.kernels.recurrent.triton import gated_delta as device_gated_delta
from outrider.kernels.recurrent.triton import mamba1 as device_mamba1
from outrider.kernels.recurrent.triton import mamba2 as device_mamba2
from tests.kernels.recurrent import recurrent_layers as layers
from tests.kernels.recurrent.recurrent_cases import Part, committed, outputs, ways
from tests.kernels.triton_device import device

ON_GPU = torch.cuda.is_available()


def on_device(kernel: Any) -> Any:
    """The kernel, for arguments in host memory: the tests' layers and states, and so their oracles, are there."""
    if not ON_GPU:
        return kernel

    def call(*arguments: Any) -> torch.Tensor:
        there = [placed(argument) for argument in arguments]
        found: torch.Tensor = kernel(*there)
        for mine, used in zip(arguments, there, strict=True):
            if isinstance(mine, LayerStates):
                for name in ("window", "state", "log"):
                    getattr(mine, name).copy_(getattr(used, name))
        return found.cpu()

    return call


def placed(value: Any) -> Any:
    """The value with each tensor in it on the device; a function of tensors computes where it is and answers there."""
    if isinstance(value, torch.Tensor):
        return value.to(device())
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: placed(getattr(value, each.name)) for each in fields(value)})
    if callable(value):
        return lambda *tensors: tuple(placed(found) for found in value(*(tensor.cpu() for tensor in tensors)))
    return value


gated_delta, gated_norm = on_device(device_gated_delta), on_device(device_gated_norm)
mamba1, mamba2, short_conv = (on_device(kernel) for kernel in (device_mamba1, device_mamba2, device_short_conv))

# (dtype, whether the oracle) -> a case; one key head, or group
SMALL: dict[str, Callable[[torch.dtype, bool], layers.Case]] = {
    "gated_delta": lambda dtype, plain: layers.gated_delta_case(
        gated_delta_reference.gated_delta if plain else gated_delta,
        dtype,
        layers.gated_delta_layer(dtype, num_key_heads=1),
    ),
    "kimi_delta": lambda dtype, plain: layers.gated_delta_case(
        gated_delta_reference.gated_delta if plain else gated_delta, dtype, layers.kimi_delta_layer(dtype, 1)
    ),
    "mamba2": lambda dtype, plain: layers.mamba2_case(
        mamba2_reference.mamba2 if plain else mamba2, dtype, layers.mamba2_layer(dtype, num_groups=1)
    ),
    "mamba1": lambda dtype, plain: layers.mamba1_case(mamba1_reference.mamba1 if plain else mamba1, dtype),
    "short_conv": lambda dtype, plain: layers.short_conv_case(
        short_conv_reference.short_conv if plain else short_conv, dtype
    ),
}
if ON_GPU:  # heads of 128, as models have them
    SMALL |= {
        "gated_delta-128": lambda dtype, plain: layers.gated_delta_case(
            gated_delta_reference.gated_delta if plain else gated_delta,
            dtype,
            layers.gated_delta_layer(dtype, key_dim=128, value_dim=128, num_key_heads=4),
        ),
        "mamba2-128": lambda dtype, plain: layers.mamba2_case(
            mamba2_reference.mamba2 if plain else mamba2,
            dtype,
            layers.mamba2_layer(dtype, num_groups=1, head_dim=64, state_size=128),
        ),
        "short_conv-2048": lambda dtype, plain: layers.short_conv_case(
            short_conv_reference.short_conv if plain else short_conv, dtype, layers.short_conv_layer(dtype, 2048)
        ),
    }
LARGE: dict[str, Callable[[torch.dtype], layers.Case]] = {
    "gated_delta": lambda dtype: layers.gated_delta_case(gated_delta, dtype),
    "kimi_delta": lambda dtype: layers.kimi_delta_case(gated_delta, dtype),
    "mamba2": lambda dtype: layers.mamba2_case(mamba2, dtype),
    "mamba1": lambda dtype: layers.mamba1_case(mamba1, dtype),
    "short_conv": lambda dtype: layers.short_conv_case(short_conv, dtype),
}
DTYPES = [torch.float32, torch.bfloat16]
NUM_ROWS = 20
ON_GPU = device().type == "cuda"
USUAL_WAYS = ("drafted chains", "drafted trees", "drafts behind a chunk")

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_rows_and_states_match_the_reference(name: str, dtype: torch.dtype) -> None:
    """Sums over a key differ in their order alone: in fp32 by some of its units, in bf16 by one, where that decides a
    rounding. Windows and logs, and convolved rows, are the same arithmetic in the same order: equal."""
    ours, theirs = SMALL[name](dtype, False), SMALL[name](dtype, True)
    drivers = ours.driver(), theirs.driver()
    rows, noise = ours.inputs(2, NUM_ROWS), ours.inputs(3, 3)
    parts = [committed(rows[:-3]), Part(rows[-3:], noise, accepted=(0,))]
    found, expected = (outputs(driver, parts) for driver in drivers)
    if name == "short_conv" and not ON_GPU:  # a GPU rounds a product and a sum at once
        assert torch.equal(found, expected)
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-2}
    torch.testing.assert_close(found, expected, **tolerance)
    slot = drivers[0].state.slot_in
    assert slot == drivers[1].state.slot_in
    mine, other = (driver.states for driver in drivers)
    assert torch.equal(mine.window[slot], other.window[slot])
    assert torch.equal(mine.log[slot, :4], other.log[slot, :4])
    torch.testing.assert_close(mine.state[slot], other.state[slot], rtol=1e-4, atol=1e-5)


# Kimi's is the gated delta rule with more numbers; interpreted, it takes half a minute, and bfloat16 as long again.
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.storm)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.storm] if name == "kimi_delta" else []) for name in SMALL]
)
def test_every_division_into_calls_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    case = SMALL[name](dtype, False)
    rows, noise = case.inputs(2, NUM_ROWS), case.inputs(3, NUM_ROWS + 4)
    expected = outputs(case.driver(), [committed(rows)])
    assert bool(expected.isfinite().all())
    histories = ways(rows, noise)
    strangers = [case.inputs(10 + count, count) for count in (1, 2)]
    for way in USUAL_WAYS:
        assert torch.equal(outputs(case.driver(), histories[way], strangers, place=1), expected), f"{way} in company"
    assert torch.equal(outputs(case.driver(), histories["single rows"]), expected)


@pytest.mark.storm
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in LARGE), ("gated_delta", torch.bfloat16)]
)
def test_every_division_of_every_kind(name: str, dtype: torch.dtype) -> None:
    case = LARGE[name](dtype)
    rows, noise = case.inputs(2), case.inputs(3, layers.NUM_ROWS + 4)
    expected = outputs(case.driver(), [committed(rows)])
    strangers = [case.inputs(10 + count, count) for count in (1, 2, 5)]
    # Some on either side of the convolution's four rows and of a tile's eight: interpreted, each takes seconds.
    for cut in (1, 4, 5, 9) if ON_GPU else (5,):
        assert torch.equal(outputs(case.driver(), [committed(rows[:cut]), committed(rows[cut:])]), expected), cut
    histories = ways(rows, noise)
    for way in histories if ON_GPU or name == "gated_delta" else USUAL_WAYS:
        parts = histories[way]
        assert torch.equal(outputs(case.driver(), parts, strangers, place=2), expected), f"{way} in company"


@pytest.mark.parametrize("name", ["kimi_delta", "mamba1"])
def test_every_number_of_drafts_and_of_accepted_ones(name: str) -> None:
    """Each followed by a round that replays what was accepted, with and without drafts of its own."""
    case = SMALL[name](torch.float32, False)
    rows, noise = case.inputs(2, 9), case.inputs(3, 6)
    expected = outputs(case.driver(), [committed(rows)])
    for count in range(4):
        for accepted in range(count + 1):
            draft = torch.cat([rows[3 : 3 + accepted], noise[: count - accepted]])
            first = Part(rows[2:3], draft, accepted=range(accepted))
            behind = rows[3 + accepted :]
            parts = [committed(rows[:2]), first, Part(behind[:1], noise[:count]), committed(behind[1:])]
            assert torch.equal(outputs(case.driver(), parts), expected), (count, accepted)


def test_a_tree_of_any_shape_computes_its_paths() -> None:
    """Against each path as a chain: nodes whose parents lie far back, and roots behind deep branches."""
    case = SMALL["kimi_delta"](torch.float32, False)
    rows, nodes = case.inputs(2, 3), case.inputs(3, 8)
    parents = [-1, 0, 1, 0, -1, 2, 4, 3]
    found = case.driver().call(Part(rows, nodes, parents))[len(rows) :]
    for node in range(len(nodes)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = case.driver().call(Part(rows, nodes[path]))
        assert torch.equal(alone[-1], found[node]), node


# What stands in the outputs of padding goes through the norm, and numpy warns.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_padding_is_neither_computed_nor_written() -> None:
    """As a captured forward has it: more rows and sessions than there are, without slots."""
    case = SMALL["kimi_delta"](torch.bfloat16, False)
    rows = case.inputs(2, 4)
    sessions = [StateRows(None, (), 3, 2), StateRows(None, (), 5, 1)]
    batch = recurrent_rows(sessions, [2, 2], [(), ()])
    plain, padded = case.states(), case.states()
    expected = case.call(rows, plain, batch)
    wide = torch.cat([rows, case.inputs(4, 4)])
    found = case.call(wide, padded, _padded(batch, num_rows=8))
    assert torch.equal(found[:4], expected)
    for name in ("window", "state", "log"):
        ours, theirs = getattr(padded, name), getattr(plain, name)
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0)), name


def _padded(rows: RecurrentRows, num_rows: int) -> RecurrentRows:
    def longer(tensor: torch.Tensor, length: int, value: int) -> torch.Tensor:
        return torch.cat([tensor, torch.full((length - len(tensor),), value, dtype=torch.int32)])

    return replace(
        rows,
        row_starts=longer(rows.row_starts, num_rows + 1, len(rows.parents)),
        kept_rows=torch.zeros(num_rows, 2, dtype=torch.int32),
        **{
            name: longer(getattr(rows, name), num_rows, -1) for name in ("parents", "slots_in", "slots_out", "sessions")
        },
        **{name: longer(getattr(rows, name), num_rows, 0) for name in ("num_chain_rows", "num_kept")},
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gates_first", [True, False])
@pytest.mark.parametrize("rounds_first", [True, False])
def test_the_gated_norm_matches_the_reference(dtype: torch.dtype, gates_first: bool, rounds_first: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(4, 100, generator=generator).to(dtype)
    x, gate = wide[:, :48].contiguous(), wide[:, 50:98]  # a part of a projection
    for activation, width in zip(ACTIVATIONS, (48, 24), strict=True):
        weight = torch.randn(width, generator=generator).to(dtype)
        layer = GatedNormLayer(weight, 24, 1e-6, gates_first, rounds_first, activation)
        found, expected = gated_norm(x, gate, layer), gated_norm_reference.gated_norm(x, gate, layer)
        # One unit of bf16 where the order of a sum decides a rounding, and one more of what is rounded first.
        tolerance = 2e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-6)
        assert torch.equal(torch.cat([gated_norm(x[row][None], gate[row][None], layer) for row in range(4)]), found)


def test_what_does_not_fit_is_refused() -> None:
    case = SMALL["short_conv"](torch.float32, False)
    states, rows = case.states(), recurrent_rows([StateRows(None, (), 0, 2)], [2], [()])
    with pytest.raises(KernelArgumentError, match="do not fit"):
        case.call(case.inputs(1, 2)[:, 1:], states, rows)
    with pytest.raises(KernelArgumentError, match="not both bf16 or float32"):
        case.call(case.inputs(1, 2).bfloat16(), states, rows)
    delta = SMALL["gated_delta"](torch.float32, False)
    narrow = delta.states()
    with pytest.raises(KernelArgumentError, match="must be float32"):
        delta.call(delta.inputs(1, 2), LayerStates(narrow.window, narrow.state.bfloat16(), narrow.log), rows)
