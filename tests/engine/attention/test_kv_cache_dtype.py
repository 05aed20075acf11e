"""A model on a KV cache in 8 bits: its memory, its error, its bits in any company, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.certificate import certify
from outrider.engine.errors import ModelRefused
from outrider.engine.model.guards import resolve_kv_codes
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.numerics import measure_numerics
from outrider.engine.recurrent.memory import plan_memory
from outrider.engine.run.runner import ModelRunner
from outrider.kernels.kv_codes.layout import scales_of
from outrider.shared.vllm_keys import KV_CACHE_DTYPES

DEMO = Path(__file__).parents[3] / "models" / "demo-target"
BLOCK_SIZE, LENGTH = 16, 160
NUM_BLOCKS = LENGTH // BLOCK_SIZE
# of the logits, relative to their root mean square; seen: 0.0047 and 0.0175 in float32, bfloat16's own 0.0076
LARGEST_ERROR = {"int8": 0.01, "fp8": 0.035}
_LOADED: dict[tuple[str, str], LoadedModel] = {}


def demo(kv_cache_dtype: str, dtype: str = "bfloat16") -> LoadedModel:
    key = (kv_cache_dtype, dtype)
    if key not in _LOADED:
        _LOADED[key] = load_model(str(DEMO), dtype=dtype, kv_cache_dtype=kv_cache_dtype, num_threads=1)
    return _LOADED[key]


def token_ids(loaded: LoadedModel) -> list[int]:
    return [(7919 * place + 1) % loaded.vocab_size for place in range(LENGTH)]


def rows_after(runner: ModelRunner, first: int, num_rows: int, *others: SessionRows) -> torch.Tensor:
    """Logits [num_rows, V] of positions [first, first + num_rows) on what the cache holds of those before."""
    ids = token_ids(runner.loaded)[first : first + num_rows]
    batch = build_batch([*others, SessionRows(ids, first, list(range(NUM_BLOCKS)), num_rows)], BLOCK_SIZE)
    return runner.forward(batch).logits[-num_rows:].clone()


def runner_of(loaded: LoadedModel) -> ModelRunner:
    return ModelRunner(loaded, loaded.make_cache(NUM_BLOCKS + 4, BLOCK_SIZE))


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_position_takes_half_of_the_memory(kv_cache_dtype: str) -> None:
    coded, plain = demo(kv_cache_dtype), demo("auto")
    per_head = [shape.num_kv_heads * (shape.key_dim + 4 + shape.value_dim + 4) for shape in coded.layer_shapes]
    assert coded.bytes_per_block(BLOCK_SIZE) == BLOCK_SIZE * sum(per_head)
    assert coded.make_cache(7, BLOCK_SIZE).num_bytes == 7 * coded.bytes_per_block(BLOCK_SIZE)
    plans = [plan_memory(64 << 20, loaded.bytes_per_block(BLOCK_SIZE), 0, 8) for loaded in (coded, plain)]
    assert 1.85 < plans[0].num_blocks / plans[1].num_blocks <= 2


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_logits_are_near_those_of_a_plain_cache(kv_cache_dtype: str) -> None:
    plain = rows_after(runner_of(demo("auto", "float32")), 0, LENGTH)
    coded = rows_after(runner_of(demo(kv_cache_dtype, "float32")), 0, LENGTH)
    error = float((coded - plain).norm() / plain.norm())
    assert 1e-4 < error < LARGEST_ERROR[kv_cache_dtype]


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_rows_have_the_same_bits_in_any_number_and_company(kv_cache_dtype: str) -> None:
    loaded = demo(kv_cache_dtype)
    expected = rows_after(runner_of(loaded), 0, LENGTH)
    other = SessionRows([5, 6, 7, 8, 9], 0, list(range(NUM_BLOCKS, NUM_BLOCKS + 4)), 5, 2, [1, 1, 3])
    runner = runner_of(loaded)
    sizes = itertools.cycle(range(1, 21))
    first = 0
    while first < LENGTH:
        num_rows = min(next(sizes), LENGTH - first)
        found = rows_after(runner, first, num_rows, *([other] if num_rows % 3 == 0 else []))
        assert torch.equal(found, expected[first : first + num_rows]), (first, num_rows)
        first += num_rows
    for num_rows in (128, 129):
        runner = runner_of(loaded)
        rows_after(runner, 0, LENGTH - num_rows)
        found = rows_after(runner, LENGTH - num_rows, num_rows, other)
        assert torch.equal(found, expected[LENGTH - num_rows :]), num_rows


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_recorded_forwards_have_the_bits_of_plain_ones(kv_cache_dtype: str) -> None:
    loaded = demo(kv_cache_dtype)
    recording = ModelRunner(loaded, loaded.make_cache(NUM_BLOCKS + 4, BLOCK_SIZE), graphs=True)
    plain = runner_of(loaded)
    assert recording.uses_graphs
    for first in range(0, 48, 4):
        assert torch.equal(rows_after(recording, first, 4), rows_after(plain, first, 4)), first
    assert recording._graphs is not None
    assert recording._graphs._recorded, "nothing was recorded"  # type: ignore[union-attr]


def test_the_certificate_catches_a_scale_that_depends_on_the_batch() -> None:
    loaded = demo("int8")
    assert certify(loaded, runner_of(loaded)).holds
    sound = loaded.attention_ops.kv_write

    def of_the_batch(key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, *others: torch.Tensor) -> None:
        sound(key, value, keys, *others)
        slots = others[-1]
        if len(slots) > 1:
            scales_of(keys)[slots[0] // BLOCK_SIZE, :, slots[0] % BLOCK_SIZE] *= 1.001

    broken = replace(loaded, attention_ops=replace(loaded.attention_ops, kv_write=of_the_batch))
    assert not certify(broken, runner_of(broken)).holds


def test_numerics_name_the_caches_type_and_differ() -> None:
    kinds = {name: measure_numerics(demo(name)) for name in ("auto", "int8", "fp8")}
    assert [kind.split("/")[0] for kind in kinds.values()] == ["bfloat16", "bfloat16+kv-int8", "bfloat16+kv-fp8"]
    assert len({kind.split("/")[-1] for kind in kinds.values()}) == 3
    assert measure_numerics(demo("fp8_per_token_head")) == kinds["fp8"], "two names of one type"


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelRefused, match=", ".join(KV_CACHE_DTYPES)):
        load_model(str(DEMO), kv_cache_dtype="fp8_e5m2")


def test_latents_stay_in_the_models_dtype_which_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.DeepseekV3Config(num_hidden_layers=1)
    assert resolve_kv_codes("folder", config, "int8") is None
    assert "folder: kv_cache_dtype=int8 is taken as auto: its attention caches latents" in caplog.text
