"""Which architectures can be cut, what is refused, and that a lost rank is noticed."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.attention.layer import ATTENTION_NAME, register_attention
from outrider.engine.attention.ops import LayerShape, resolve_attention_ops
from outrider.engine.certificate import certify
from outrider.engine.errors import EngineError, ModelRefused
from outrider.engine.model.guards import probe_layers
from outrider.engine.run.runner import ModelRunner
from outrider.engine.tensor_parallel.agreement import require_agreement, sample_logits
from outrider.engine.tensor_parallel.leader import load_sharded
from outrider.engine.tensor_parallel.protocol import LoadSpec
from outrider.engine.tensor_parallel.sharding import cut_model
from tests.engine.latent_models import LATENT_MODELS
from tests.engine.tensor_parallel.rank_pair import forked_ranks, forward, load_pair
from tests.engine.tiny_models import SERVED, save_tiny_model


@pytest.fixture(autouse=True, scope="module")
def _forked_ranks() -> Iterator[None]:
    with forked_ranks():
        yield


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama_tied", "bfloat16"),
        ("gemma2", "float32"),
        ("gpt_neox", "float32"),
        ("phi", "bfloat16"),
        ("olmo2", "float32"),
        ("mixtral", "float32"),
        ("qwen3_moe", "float32"),
        ("phimoe", "float32"),
        ("deepseek_v3", "float32"),
    ],
)
def test_architectures(name: str, dtype: str, tmp_path: Path) -> None:
    """Fused and separate projections, biases, odd widths, experts: load_model compares the ranks' logits with the whole
    model's, here one process's are compared once more, and the certificate has to hold."""
    pair = load_pair(save_tiny_model(*(SERVED | LATENT_MODELS)[name], tmp_path), dtype)
    try:
        both = zip(pair.alone.layer_shapes, pair.together.layer_shapes, strict=True)
        assert all(alone.values_in_keys == together.values_in_keys for alone, together in both)
        token_ids = list(range(3, 60))
        alone, together = forward(pair.alone, token_ids).logits, forward(pair.together, token_ids).logits
        tolerance = 1e-5 if dtype == "float32" else 0.05
        torch.testing.assert_close(together, alone, rtol=0, atol=tolerance * float(alone.abs().max()))
        with pytest.raises(EngineError, match="one tensor-parallel model per process"):
            load_pair(tmp_path, dtype)
        certificate = certify(pair.together, ModelRunner(pair.together, pair.together.make_cache(2, 8)))
        assert certificate.holds, certificate.describe()
    finally:
        pair.together.close()
    assert pair.failures.empty()


def read_whole(name: str, directory: Path) -> tuple[Any, list[LayerShape]]:
    path = save_tiny_model(*SERVED[name], directory)
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=ATTENTION_NAME).eval()
    ops = resolve_attention_ops("reference", torch.device("cpu"))
    return model, probe_layers(str(path), model, ops, range(model.config.num_hidden_layers))


@pytest.mark.parametrize(
    ("name", "size", "cause"),
    [
        ("gpt2", 2, "GPT2LMHeadModel has no tensor-parallel plan"),
        ("phi3", 2, "the plan of Phi3ForCausalLM cuts none of its layers"),
        ("gpt_oss", 2, "the plan of GptOssForCausalLM cuts none of its layers"),
        ("llama", 3, "q_proj has 80 features of 2 KV heads, which 3 ranks cannot share"),
    ],
)
def test_what_cannot_be_cut_is_refused(name: str, size: int, cause: str, tmp_path: Path) -> None:
    model, shapes = read_whole(name, tmp_path)
    with pytest.raises(ModelRefused) as refused:
        cut_model("checkpoint", model, shapes, 0, size)
    assert cause in refused.value.cause
    assert refused.value.fix is not None
    assert "tensor_parallel_size" in refused.value.fix


def test_a_style_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """A mixture whose plan loses what makes its parameters ones of experts: as new architectures will have others."""
    model, shapes = read_whole("mixtral", tmp_path)
    model._tp_plan = {name: style for name, style in model._tp_plan.items() if style != "moe_tp_experts"}
    with pytest.raises(ModelRefused, match="asks for packed_colwise, which is not known here"):
        cut_model("checkpoint", model, shapes, 0, 2)


def test_a_refusal_ends_every_rank(tmp_path: Path) -> None:
    failures: queue.Queue[str] = queue.Queue()
    path = save_tiny_model(*SERVED["gpt2"], tmp_path)
    with pytest.raises(ModelRefused, match="no tensor-parallel plan"):
        load_sharded(LoadSpec(str(path), "auto", "cpu", "auto", None, 2), 2, on_failure=failures.put)
    assert failures.empty()


@torch.inference_mode()
def test_a_head_in_the_wrong_place_is_noticed(tmp_path: Path) -> None:
    model, shapes = read_whole("llama", tmp_path)
    whole = sample_logits(model, shapes)
    require_agreement("checkpoint", whole, sample_logits(model, shapes))
    weight = model.get_submodule("model.layers.0.self_attn.q_proj").weight
    weight.copy_(weight.roll(20, dims=0))  # every head takes its neighbour's place
    with pytest.raises(ModelRefused, match="its logits are off by"):
        require_agreement("checkpoint", whole, sample_logits(model, shapes))


def test_the_death_of_a_rank_is_noticed_at_once(tmp_path: Path) -> None:
    pair = load_pair(save_tiny_model(*SERVED["llama"], tmp_path), "float32")
    leader = pair.together.leader
    assert leader is not None
    try:
        os.kill(leader.pids[0], signal.SIGKILL)
        assert pair.failures.get(timeout=60) == "tensor-parallel rank 1 has died (exit code -9)"
        with pytest.raises(Exception, match=r"closed|reset|Broken pipe|peer"):  # and a forward does not hang
            forward(pair.together, [3, 4, 5])
    finally:
        leader.close()
