"""The gated delta rule: every way to the same rows gives the same bits, and they are transformers' to rounding."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from outrider.kernels.recurrent import cpu
from outrider.kernels.recurrent.gated_delta import reference
from outrider.kernels.recurrent.gated_delta.arguments import GatedDelta, GatedDeltaLayer
from outrider.kernels.recurrent.gated_norm.arguments import GatedNormLayer
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows
from tests.kernels.recurrent.recurrent_cases import Driver, committed, drafted_trees, nan_states, outputs, ways

KERNELS: dict[str, GatedDelta] = {"cpu": cpu.gated_delta, "reference": reference.gated_delta}
# heads of keys and of values, and their sizes; odd ones, where vectors have tails
SHAPES = {"odd": (2, 6, 12, 20), "square": (2, 2, 32, 32)}
_NUM_TAPS = 4
_NUM_ROWS = 40


def make_layer(shape: str, dtype: torch.dtype) -> GatedDeltaLayer:
    num_key_heads, num_value_heads, key_dim, value_dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(1)
    num_channels = 2 * num_key_heads * key_dim + num_value_heads * value_dim
    norm_weight = 1.0 + 0.1 * torch.randn(value_dim, generator=generator)
    return GatedDeltaLayer(
        num_key_heads,
        num_value_heads,
        key_dim,
        value_dim,
        conv_weight=(0.5 * torch.randn((num_channels, _NUM_TAPS), generator=generator)).to(dtype),
        decay_rate=-torch.rand(num_value_heads, generator=generator) - 0.01,
        dt_bias=torch.randn(num_value_heads, generator=generator),
        norm=GatedNormLayer(norm_weight.to(dtype), value_dim, 1e-6, gates_first=False, rounds_first=True),
    )


def make_states(layer: GatedDeltaLayer, dtype: torch.dtype) -> LayerStates:
    width = layer.num_channels + 2 * layer.num_value_heads
    state_shape = (layer.num_value_heads, layer.key_dim, layer.value_dim)
    return nan_states(_NUM_TAPS, layer.num_channels, state_shape, width, dtype)


def random_rows(layer: GatedDeltaLayer, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Raw rows and their gates, side by side: so that a row keeps its gate in whatever call it is."""
    width = layer.num_channels + 2 * layer.num_value_heads + layer.num_value_heads * layer.value_dim
    return torch.randn((count, width), generator=torch.Generator().manual_seed(seed)).to(dtype)


def new_driver(kernel: GatedDelta, layer: GatedDeltaLayer, dtype: torch.dtype) -> Driver:
    raw_width = layer.num_channels + 2 * layer.num_value_heads

    def run(rows: torch.Tensor, states: LayerStates, sessions: object) -> torch.Tensor:
        raw, gate = rows[:, :raw_width].contiguous(), rows[:, raw_width:].contiguous()
        return kernel(raw, gate, layer, states, sessions)  # type: ignore[arg-type]

    return Driver(run, make_states(layer, dtype))


@pytest.fixture(params=sorted(KERNELS))
def kernel(request: pytest.FixtureRequest) -> GatedDelta:
    return KERNELS[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_way_gives_the_same_bits(kernel: GatedDelta, shape: str, dtype: torch.dtype) -> None:
    layer = make_layer(shape, dtype)
    rows, noise = random_rows(layer, _NUM_ROWS, dtype, 2), random_rows(layer, _NUM_ROWS + 4, dtype, 3)
    whole = new_driver(kernel, layer, dtype)
    expected = outputs(whole, [committed(rows)])
    assert bool(torch.isfinite(expected).all())
    for name, parts in ways(rows, noise).items():
        found = outputs(new_driver(kernel, layer, dtype), parts)
        assert torch.equal(found, expected), name
    strangers = [random_rows(layer, count, dtype, 10 + count) for count in (1, 2, 5)]
    for name in ("three chunks", "drafted chains", "drafted trees"):
        for place in (0, 2, 3):
            found = outputs(new_driver(kernel, layer, dtype), ways(rows, noise)[name], strangers, place)
            assert torch.equal(found, expected), (name, place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_state_is_float32_and_the_same_after_one_call_and_after_many(
    kernel: GatedDelta, dtype: torch.dtype
) -> None:
    layer = make_layer("odd", dtype)
    rows = random_rows(layer, 64, dtype, 4)
    whole, singles = new_driver(kernel, layer, dtype), new_driver(kernel, layer, dtype)
    outputs(whole, [committed(rows)])
    outputs(singles, [committed(row[None]) for row in rows])
    ours, theirs_ = (driver.states.state[driver.state.slot_in] for driver in (whole, singles))
    assert ours.dtype == torch.float32
    assert bool(torch.isfinite(ours).all())
    assert torch.equal(ours, theirs_)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("accepted rows are not replayed", lambda rows: replace(rows, num_kept=rows.num_kept.clamp(max=1))),
        ("nothing is replayed", lambda rows: replace(rows, num_kept=torch.zeros_like(rows.num_kept))),
        ("a row of another branch", lambda rows: replace(rows, kept_rows=(rows.kept_rows - 1).clamp(min=0))),
        ("parents are ignored", lambda rows: replace(rows, parents=torch.arange(len(rows.parents)).int() - 1)),
        ("drafts advance the state", lambda rows: replace(rows, num_chain_rows=rows.row_starts.diff())),
    ],
)
def test_these_ways_tell_a_wrong_call(name: str, wrong: Callable[[RecurrentRows], RecurrentRows]) -> None:
    layer = make_layer("odd", torch.float32)
    rows, noise = (random_rows(layer, count, torch.float32, count) for count in (_NUM_ROWS, _NUM_ROWS + 4))
    expected = outputs(new_driver(reference.gated_delta, layer, torch.float32), [committed(rows)])
    driver = new_driver(reference.gated_delta, layer, torch.float32)
    right = driver.kernel
    driver.kernel = lambda each, states, sessions: right(each, states, wrong(sessions))
    assert not torch.equal(outputs(driver, drafted_trees(rows, noise)), expected), name


def test_no_other_implementation_hides_behind_transformers_functions() -> None:
    """The oracle below is transformers' torch code only without these packages."""
    assert [name for name in ("fla", "causal_conv1d") if importlib.util.find_spec(name)] == []


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("form", ["chunks", "steps"])
def test_the_outputs_are_those_of_transformers(kernel: GatedDelta, shape: str, form: str) -> None:
    layer = make_layer(shape, torch.float32)
    rows = random_rows(layer, _NUM_ROWS, torch.float32, 5)
    found = outputs(new_driver(kernel, layer, torch.float32), [committed(rows)])
    num_heads, width = layer.num_value_heads, layer.num_channels
    channels, b, a, gate = rows.split([width, num_heads, num_heads, num_heads * layer.value_dim], dim=1)
    mixed = theirs.causal_conv1d_fn(channels.t()[None], layer.conv_weight, activation="silu")[0].t()
    key_width = layer.num_key_heads * layer.key_dim
    heads = [
        part.reshape(1, _NUM_ROWS, -1, size)
        for part, size in zip(
            mixed.split([key_width, key_width, num_heads * layer.value_dim], dim=1),
            (layer.key_dim, layer.key_dim, layer.value_dim),
            strict=True,
        )
    ]
    decay = layer.decay_rate * torch.nn.functional.softplus(a + layer.dt_bias)
    rule = theirs.torch_chunk_gated_delta_rule if form == "chunks" else theirs.torch_recurrent_gated_delta_rule
    attended, _ = rule(*heads, g=decay[None], beta=b.sigmoid()[None], use_qk_l2norm_in_kernel=True)
    norm = theirs.Qwen3_5RMSNormGated(layer.value_dim, eps=layer.norm.eps)
    norm.weight.data = layer.norm.weight
    with torch.no_grad():
        expected = norm(attended.reshape(-1, layer.value_dim), gate.reshape(-1, layer.value_dim))
    torch.testing.assert_close(found, expected.view(_NUM_ROWS, -1), atol=5e-6, rtol=5e-5)
