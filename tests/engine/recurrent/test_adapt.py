"""Hybrids are served with mixers of ours that do what transformers' modules do; whatever else is refused by name."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import HYBRIDS, save_tiny_model
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.attention.ops import resolve_attention_ops
from outrider.engine.errors import EngineError, ModelRefused
from outrider.engine.model.guards import require_supported_architecture
from outrider.engine.model.lean.lean_rotary import LeanRotaryEmbedding
from outrider.engine.model.load import load_model
from outrider.engine.recurrent.kernels import resolve_recurrent_kernels
from outrider.engine.recurrent.memory import plan_memory
from outrider.engine.recurrent.mixers.gated_delta import GatedDeltaMixer
from outrider.engine.recurrent.rows import StateRows
from outrider.engine.run.runner import ModelRunner


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(*HYBRIDS["qwen3_5"], tmp_path_factory.mktemp("qwen3_5"))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "qwen3_5_moe"])
def test_layers_are_numbered_by_kind(name: str, tmp_path: Path) -> None:
    """Layer 1 attends and is the KV cache's first; 0, 2 and 3 are recurrent."""
    loaded = load_model(str(save_tiny_model(*HYBRIDS[name], tmp_path)))
    assert [shape.module_name for shape in loaded.layer_shapes] == ["model.layers.1.self_attn"]
    assert loaded.model.model.layers[1].self_attn.layer_idx == 0
    assert [shape.module_name for shape in loaded.recurrent_shapes] == [
        f"model.layers.{layer}.linear_attn" for layer in (0, 2, 3)
    ]
    assert [loaded.model.model.layers[layer].linear_attn.state_idx for layer in (0, 2, 3)] == [0, 1, 2]
    assert loaded.num_layers == 4


def test_bytes_are_those_that_are_allocated(qwen: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        loaded = load_model(str(qwen), dtype=dtype)
        states = loaded.make_states(5, 7)
        assert states is not None
        assert states.num_bytes == 5 * loaded.bytes_per_slot(7)
        assert {layer.state.dtype for layer in states.layers} == {torch.float32}


def test_a_module_that_computes_something_else_is_refused(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = theirs.Qwen3_5GatedDeltaNet.forward
    monkeypatch.setattr(
        theirs.Qwen3_5GatedDeltaNet,
        "forward",
        lambda self, hidden_states, **arguments: right(self, 1.001 * hidden_states, **arguments),
    )
    with pytest.raises(ModelRefused, match="Qwen3_5GatedDeltaNet is not computed by our mixer"):
        load_model(str(qwen))


def test_a_module_with_other_parts_is_refused(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = theirs.Qwen3_5GatedDeltaNet.__init__

    def with_gelu(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        self.activation = "gelu"

    monkeypatch.setattr(theirs.Qwen3_5GatedDeltaNet, "__init__", with_gelu)
    with pytest.raises(ModelRefused, match="activation gelu"):
        load_model(str(qwen))


def test_a_convolution_outside_the_mixers_is_refused(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = theirs.Qwen3_5MLP.__init__

    def with_convolution(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        self.conv = torch.nn.Conv1d(1, 1, 1)

    monkeypatch.setattr(theirs.Qwen3_5MLP, "__init__", with_convolution)
    monkeypatch.setattr("outrider.engine.model.guards.require_all_weights", lambda *_: None)
    with pytest.raises(ModelRefused, match=r"layers\.0\.mlp\.conv is a convolution outside"):
        load_model(str(qwen))


def test_a_layer_that_does_not_call_its_mixer_is_refused(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def skipping(self: Any, hidden_states: torch.Tensor, **_arguments: Any) -> torch.Tensor:
        return hidden_states

    monkeypatch.setattr(GatedDeltaMixer, "forward", skipping)
    with pytest.raises(ModelRefused, match="called 0 recurrent layers in a forward of 3"):
        load_model(str(qwen))


def test_an_unknown_kind_of_layer_is_refused(tmp_path: Path) -> None:
    config = Qwen3_5TextConfig(**HYBRIDS["qwen3_5"][1])
    config.layer_types = ["linear_attention", "conv", "linear_attention", "full_attention"]
    with pytest.raises(ModelRefused, match="layers of type conv"):
        require_supported_architecture(str(tmp_path), config)


def test_triton_selects_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    ops = resolve_attention_ops("auto", torch.device("cuda"))
    chosen = asdict(resolve_recurrent_kernels(ops.backend)).values()
    assert [kernel.__module__.rpartition(".")[2] for kernel in chosen] == ["triton"] * 5


def test_rotary_tables_serve_positions_in_three_equal_planes(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(str(qwen))
    assert isinstance(loaded.model.model.rotary_emb, LeanRotaryEmbedding)
    runner = ModelRunner(loaded, loaded.make_cache(1), loaded.make_states(1))
    monkeypatch.setattr(theirs.Qwen3_5TextRotaryEmbedding, "forward", lambda *_arguments: pytest.fail("no table"))
    runner.forward(build_batch([SessionRows([5, 6], 0, [0], 1, state=StateRows(None, (), 0, 2))], 16))


def test_recurrent_layers_are_not_shared_among_ranks(qwen: Path) -> None:
    with pytest.raises(ModelRefused, match=r"recurrent layers cannot be shared among ranks.*tensor_parallel_size=1"):
        load_model(str(qwen), cut=lambda *_whole: pytest.fail("cut"))


def test_a_forward_without_states_says_so(qwen: Path) -> None:
    loaded = load_model(str(qwen))
    batch = build_batch([SessionRows([5], 0, [0], 1, state=StateRows(None, (), 0, 1))], 16)
    without = build_batch([SessionRows([5], 0, [0], 1)], 16)
    for runner, each in (
        (ModelRunner(loaded, loaded.make_cache(1)), batch),
        (ModelRunner(loaded, loaded.make_cache(1), loaded.make_states(1)), without),
    ):
        with pytest.raises(EngineError, match="needs its sessions' states"):
            runner.forward(each)


def test_a_mixer_takes_what_its_model_was_given_and_nothing_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(str(save_tiny_model(*HYBRIDS["jamba"], tmp_path)))
    layer: Any = loaded.model.model.layers[0]
    runner = ModelRunner(loaded, loaded.make_cache(1), loaded.make_states(1))

    def fail(*_arguments: Any) -> None:
        raise RuntimeError("a failing layer")

    monkeypatch.setattr(layer.feed_forward, "forward", fail)
    with pytest.raises(RuntimeError, match="a failing layer"):
        runner.forward(build_batch([SessionRows([5], 0, [0], 1, state=StateRows(None, (), 0, 1))], 16))
    with pytest.raises(EngineError, match="called outside its model"):
        layer.mamba(torch.zeros(1, 1, loaded.hidden_size))


def test_a_model_without_attention_has_blocks_of_nothing_and_all_else(tmp_path: Path) -> None:
    """Its blocks cost little in a budget, so that they bound no context."""
    loaded = load_model(str(save_tiny_model(*HYBRIDS["mamba"], tmp_path)), max_model_len=64)
    assert (loaded.layer_shapes, len(loaded.recurrent_shapes)) == ((), 3)
    cache = loaded.make_cache(5, 16)
    assert list(cache.parts()) == []
    cache.move(torch.tensor([1]), torch.tensor([2]))
    plan = plan_memory(8 << 20, loaded.bytes_per_block(16), loaded.bytes_per_slot(), max_num_seqs=4)
    assert plan.num_slots == 12
    assert plan.num_blocks > 1000
