"""Whole hybrids on the GPU's kernels, interpreted on the CPU where there is no GPU. Oracle: the same model on the CPU's
kernels, which have their own. One recurrent layer and one that attends: an interpreted forward takes half a second.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_sequences import HybridSequence, Round, step, with_trees
from tiny_models import HYBRIDS, VOCAB_SIZE, save_tiny_model

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.recurrent.mixers.mixer import RecurrentMixer
from outrider.engine.recurrent.rows import StateRows
from outrider.engine.recurrent.table import StateTable
from outrider.engine.run.row_buckets import Bucket, bucket_of, empty_batch, fill
from outrider.engine.run.runner import ModelRunner
from tests.kernels.triton_device import device

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 4
TOKENS = [(11 * place) % 59 + 1 for place in range(14)]
_NUM_SLOTS = 8
_TWO_LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    },
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    # Every expert has a part in every row: else the other kernels' rounding may send a row elsewhere.
    "jamba": {"num_experts_per_tok": 4},
    "kimi_linear": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts_per_tok": 4,
    },
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}


def _save(name: str, folder: Path) -> Path:
    config, arguments = HYBRIDS[name]
    return save_tiny_model(config, {**arguments, **_TWO_LAYERS[name]}, folder)


def _load(folder: Path, dtype: str) -> LoadedModel:
    return load_model(str(folder), dtype=dtype, device=device().type, attention_backend="triton")


def _sequence(loaded: LoadedModel) -> HybridSequence:
    """In memory that is full of NaN."""
    runner = ModelRunner(loaded, loaded.make_cache(12, BLOCK_SIZE), loaded.make_states(_NUM_SLOTS))
    assert runner.states is not None
    for layer in runner.states.layers:
        for tensor in (layer.window, layer.state, layer.log):
            tensor.fill_(math.nan)
    return HybridSequence(runner, StateTable(_NUM_SLOTS), TOKENS, [7, 2, 9, 4, 11, 0])


def _logits(loaded: LoadedModel, rounds: list[Round], *, in_company: bool = False) -> torch.Tensor:
    ours = _sequence(loaded)
    for each in rounds:
        company = []
        if in_company:
            company = [(HybridSequence(ours.runner, ours.table, TOKENS[5:8], [1, 3]), Round(3))]
        step([*company, (ours, each)])
        for stranger, _ in company:
            stranger.table.close(stranger.state)
    return torch.stack(ours.logits)


def _chains() -> list[Round]:
    """Some, none and all of a draft accepted, and a round without."""
    right = TOKENS[6:]
    return [Round(5), Round(1, [*right[:1], 5, 5], accepted=(0,)), Round(1, [5, 6]), Round(1), Round(1, TOKENS[10:12],
            accepted=(0, 1)), Round(2)]  # fmt: skip


def _assert_one_set_of_bits(loaded: LoadedModel) -> None:
    whole = _logits(loaded, [Round(len(TOKENS))])
    assert bool(torch.isfinite(whole).all())
    assert torch.equal(_logits(loaded, [Round(3), Round(10), Round(1)]), whole)
    assert torch.equal(_logits(loaded, _chains(), in_company=True), whole)
    assert torch.equal(_logits(loaded, with_trees(TOKENS, 2, VOCAB_SIZE)), whole)


def _assert_near_the_cpus(loaded: LoadedModel, folder: Path) -> None:
    dtype = str(loaded.dtype).removeprefix("torch.")
    other = load_model(str(folder), dtype=dtype, device="cpu", attention_backend="cpu")
    found, expected = (_logits(model, [Round(len(TOKENS))]).float().cpu() for model in (loaded, other))
    tolerance = 1e-4 if loaded.dtype == torch.float32 else 0.15
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


# Interpreted, bfloat16 takes three times as long.
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.storm)])
def test_a_hybrid_on_the_gpus_kernels(tmp_path: Path, dtype: str) -> None:
    """Selected for the device, near the CPU's, and one set of bits however its rows are divided."""
    folder = _save("qwen3_5", tmp_path)
    loaded = _load(folder, dtype)
    mixers = [module for module in loaded.model.modules() if isinstance(module, RecurrentMixer)]
    assert [mixer._kernel.__module__ for mixer in mixers] == ["outrider.kernels.recurrent.triton"]
    assert loaded.row_invariance is not None
    assert loaded.row_invariance.linear_method == "triton"
    _assert_near_the_cpus(loaded, folder)
    _assert_one_set_of_bits(loaded)


@pytest.mark.storm
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in _TWO_LAYERS if name != "qwen3_5"), ("bamba", "bfloat16")]
)
def test_every_kind_on_the_gpus_kernels(name: str, dtype: str, tmp_path: Path) -> None:
    folder = _save(name, tmp_path)
    loaded = _load(folder, dtype)
    _assert_near_the_cpus(loaded, folder)
    _assert_one_set_of_bits(loaded)


# Attention leaves the outputs of padding as it found them; whatever that is goes through the layers, and numpy warns.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_padding_changes_no_bit(tmp_path: Path) -> None:
    """A captured forward computes the padded batch in the place of the batch: a verify that replays, and a stranger."""
    loaded = _load(_save("qwen3_5", tmp_path), "float32")
    found = []
    for pads in (False, True):
        ours = _sequence(loaded)
        step([(ours, Round(4, [TOKENS[4], 9], accepted=(0,)))])
        state = StateRows(ours.state.slot, ours.state.kept_rows, ours.table.reserve(ours.state), 1)
        sessions = [
            SessionRows(TOKENS[5:8], 5, ours.block_ids, 3, state=state),
            SessionRows(TOKENS[:2], 0, [1], 2, state=StateRows(None, (), 7, 2)),
        ]
        batch = build_batch(sessions, BLOCK_SIZE)
        bucket = bucket_of(batch)
        assert bucket == Bucket(8, 32, 2)
        padded = empty_batch(bucket)
        fill(padded, batch)
        fill(padded, batch)  # what stood there before leaves no trace
        logits = ours.runner.forward(padded if pads else batch).logits[:5].clone()
        assert ours.runner.states is not None
        layers = ours.runner.states.layers
        found.append([logits, *(tensor.nan_to_num(7.0) for layer in layers for tensor in (layer.window, layer.state))])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
