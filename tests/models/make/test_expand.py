"""Expansion keeps the function: compared with the source model's own logits, on weights large enough to notice."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.make.expand import Shape, expand, main, max_logit_difference
from models.make.family import export_model
from outrider.training.errors import ExpansionError


def random_llama(num_heads: int = 4, num_kv_heads: int = 2, tied: bool = True) -> LlamaForCausalLM:
    """Weights far from initialization, so that logits are of order 1 and every wrong factor shows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "shape",
    [Shape(24, 2, 40, 4), Shape(96, 2, 40, 4), Shape(24, 5, 40, 4), Shape(42, 3, 64, 6), Shape(104, 4, 72, 8, 4)],
)
def test_logits_are_preserved(shape: Shape, tied: bool) -> None:
    source = random_llama(tied=tied)
    expanded = expand(source, shape)
    logits = source(input_ids=torch.arange(97)[None]).logits
    assert logits.std() > 0.5, "logits too small for the comparison to mean anything"
    assert expanded.config.num_hidden_layers == shape.num_layers
    assert expanded.get_input_embeddings().weight.shape == (97, shape.hidden_size)
    assert max_logit_difference(source, expanded) < 5e-5


@pytest.mark.parametrize("damaged", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_the_check_sees_a_broken_expansion(damaged: str) -> None:
    source = random_llama()
    expanded = expand(source, Shape(48, 3, 64, 6))
    with torch.no_grad():
        expanded.state_dict()[damaged].add_(0.01)
    assert max_logit_difference(source, expanded) > 1e-3


def test_filler_is_real_arithmetic() -> None:
    """Everything that cannot reach the logits is filled with ordinary numbers: no zeros to skip, no denormals."""
    expanded = expand(random_llama(), Shape(48, 3, 64, 6))
    for name, tensor in expanded.state_dict().items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")):
            continue
        magnitudes = tensor.abs()
        assert float((magnitudes > 1e-8).float().mean()) > 0.999, name


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(16, 2, 40, 4), "hidden_size=16"),
        (Shape(24, 1, 40, 4), "num_layers=1"),
        (Shape(24, 2, 39, 4), "intermediate_size=39"),
        (Shape(24, 2, 40, 2), "num_heads=2"),
        (Shape(24, 2, 40, 8, 2), "must be 2 each"),
        (Shape(100, 2, 40, 8), "hidden_size=100 is not a multiple of num_heads=8"),
    ],
)
def test_impossible_shapes_are_refused(shape: Shape, message: str) -> None:
    with pytest.raises(ExpansionError, match=message):
        expand(random_llama(), shape)


def test_written_model_is_the_same_function(tmp_path: Path) -> None:
    """With H = 4 h every factor is a power of two, so the bf16 files hold the function exactly."""
    source_dir, out = tmp_path / "small", tmp_path / "large"
    export_model(random_llama(4, 4), source_dir, None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source_dir / name).write_text("{}")
    main(source_dir, out, hidden_size=96, num_layers=3, intermediate_size=48, num_heads=6)
    source = LlamaForCausalLM.from_pretrained(source_dir, dtype=torch.float32)
    written = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert written.config.rms_norm_eps == pytest.approx(1e-2 / 4)
    assert max_logit_difference(source, written) < 5e-5
    assert (out / "tokenizer.json").read_text() == "{}"
