"""EAGLE-1/2 folders: what is loaded computes the published equations on the tensors of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.drafting.checkpoints.eagle import load_eagle
from outrider.drafting.checkpoints.recognise import recognise
from outrider.drafting.checkpoints.target_weights import TargetWeights
from outrider.engine.errors import ModelRefused
from outrider.engine.model.local_model import local_model
from tests.drafting.checkpoints import plain_writer as plain
from tests.drafting.heads import plain_math

TOKENS = [3, 36, 0, 5, 5, 9]
FEATURES = plain.numbers(len(TOKENS), plain.HIDDEN, seed=902)
POSITIONS = [11, 12, 13, 14, 15, 16]

# name -> (changes of the config, arguments of the tensors, changes of the shape)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "as published": ({}, {}, {}),
    "without a bias": ({"bias": False}, {"fc_bias": False}, {}),
    "qkv biases (qwen2)": ({"model_type": "qwen2"}, {"qkv_bias": True}, {}),
    "three layers": ({"num_hidden_layers": 3}, {"num_layers": 3}, {"num_layers": 3}),
    "another RoPE base": ({"rope_theta": 500000.0}, {}, {"theta": 500000.0}),
    "wrapped by vLLM": ({"wrapped": True}, {}, {}),
    "in pytorch_model.bin, as on the Hub": ({"file": "pytorch_model.bin"}, {}, {}),
}


def shape(**changes: Any) -> plain_math.Shape:
    return plain_math.Shape(plain.HEADS, plain.KV_HEADS, plain.HEAD_DIM, **changes)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_computes_the_published_head(variant: str, target: TargetWeights, tmp_path: Path) -> None:
    changes, arguments, shape_changes = VARIANTS[variant]
    tensors = plain.eagle1_tensors(**arguments)
    config = plain.eagle1_config(**changes)
    file = config.pop("file", "model.safetensors")
    if config.pop("wrapped", False):
        config = {"model_type": "eagle", "model": config, "architectures": ["EagleLlamaForCausalLM"]}
    folder = plain.write(tmp_path, config, tensors, file)
    assert recognise(folder) == "eagle"
    head = load_eagle(folder, target, torch.float32, attn_implementation="eager")
    assert head.feature_layers == (plain.NUM_TARGET_LAYERS,)
    with torch.no_grad():
        fused = head.fuse(FEATURES[None])
        features = head(torch.tensor([TOKENS]), fused, torch.tensor([POSITIONS]))
        logits = head.logits(features[0])
    theirs = plain_math.doubled(plain.target_tensors())
    wanted = plain_math.eagle1(
        plain_math.doubled(tensors),
        theirs["model.embed_tokens.weight"],
        TOKENS,
        FEATURES.double(),
        POSITIONS,
        plain_math.causal(len(TOKENS)),
        shape(**shape_changes),
    )
    torch.testing.assert_close(features[0].double(), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits.double(), wanted @ theirs["lm_head.weight"].T, atol=1e-5, rtol=0)


def test_a_copy_of_the_targets_embedding_is_not_held_twice(target: TargetWeights, tmp_path: Path) -> None:
    tensors = plain.eagle1_tensors() | {"embed_tokens.weight": plain.target_tensors()["model.embed_tokens.weight"]}
    head = load_eagle(plain.write(tmp_path, plain.eagle1_config(), tensors), target, torch.float32)
    assert head.embed_tokens.weight.data_ptr() == target.embedding.data_ptr()
    assert "embed_tokens.weight" not in head.state_dict()


def test_an_embedding_and_an_output_head_of_its_own_are_used(target: TargetWeights, tmp_path: Path) -> None:
    own = plain.numbers(plain.VOCAB, plain.HIDDEN, seed=5)
    tensors = plain.eagle1_tensors() | {"embed_tokens.weight": own, "lm_head.weight": own + 1}
    head = load_eagle(plain.write(tmp_path, plain.eagle1_config(), tensors), target, torch.float32)
    assert torch.equal(head.state_dict()["embed_tokens.weight"], own)
    assert torch.equal(head.embed_tokens(torch.tensor(4)), own[4])
    torch.testing.assert_close(head.logits(FEATURES), FEATURES @ (own + 1).T)


def test_the_buffers_of_old_transformers_are_no_mismatch(target: TargetWeights, tmp_path: Path) -> None:
    tensors = plain.eagle1_tensors() | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    load_eagle(plain.write(tmp_path, plain.eagle1_config(), tensors), target, torch.float32)


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_own_cache")
def test_mistrals_own_layout_computes_the_published_head(target: TargetWeights, tmp_path: Path) -> None:
    tensors = plain.mistral_eagle_tensors()
    folder = local_model(str(plain.write_mistral(tmp_path / "head", plain.mistral_params(), tensors)), "draft")
    assert (Path(folder).name, recognise(folder)) == ("head", "eagle")
    head = load_eagle(folder, target, torch.float32, attn_implementation="eager")
    with torch.no_grad():
        features = head(torch.tensor([TOKENS]), head.fuse(FEATURES[None]), torch.tensor([POSITIONS]))
    wanted = plain_math.eagle1(
        plain_math.doubled(tensors),
        plain_math.doubled(plain.target_tensors())["model.embed_tokens.weight"],
        TOKENS,
        FEATURES.double(),
        POSITIONS,
        plain_math.causal(len(TOKENS)),
        shape(rotates_neighbours=True, has_norms=True),
    )
    torch.testing.assert_close(features[0].double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("apply_scale", [True, False])
def test_mistrals_own_layout_with_latents_in_fp8(apply_scale: bool, target: TargetWeights, tmp_path: Path) -> None:
    """As Mistral-Small-4-119B-2603-eagle: two layers, queries scaled by position, one scale per weight."""
    tensors = plain.with_latents(plain.mistral_eagle_tensors() | plain.layer_tensors("layers.1", seed=60))
    tensors["layers.1.input_layernorm.weight"] = plain.numbers(plain.HIDDEN, seed=61)
    stored, exact = {}, {}
    for name, part in tensors.items():
        scale = torch.tensor(0.125)
        packed = (part / scale).to(torch.float8_e4m3fn)
        is_packed = part.ndim == 2 and name != "fc.weight"
        exact[name] = packed.float() * scale if is_packed else part
        stored[name] = packed if is_packed else part
        if is_packed:
            stored[name.replace(".weight", ".qscale_weight")] = scale
            stored[name.replace(".weight", ".qscale_act")] = torch.tensor(3.0)
    yarn = {"original_max_position_embeddings": 8, "factor": 16, "beta": 32, "alpha": 1, "apply_scale": apply_scale}
    params = plain.mistral_params(
        **plain.latent_sizes(),
        n_layers=2,
        yarn=yarn,
        llama_4_scaling={"beta": 0.5, "original_max_position_embeddings": 8},
        quantization={"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
    )
    folder = local_model(str(plain.write_mistral(tmp_path / "head", params, stored)), "draft")
    assert recognise(folder) == "eagle"
    head = load_eagle(folder, target, torch.float32, attn_implementation="eager")
    with torch.no_grad():
        features = head(torch.tensor([TOKENS]), head.fuse(FEATURES[None]), torch.tensor([POSITIONS]))
    scaling = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}
    wanted = plain_math.eagle1(
        plain_math.doubled(exact),
        plain_math.doubled(plain.target_tensors())["model.embed_tokens.weight"],
        TOKENS,
        FEATURES.double(),
        POSITIONS,
        plain_math.causal(len(TOKENS)),
        shape(
            rotates_neighbours=True,
            has_norms=True,
            num_layers=2,
            key_dim=plain.KEY_DIM,
            value_dim=plain.VALUE_DIM,
            rope_scaling=scaling | ({"mscale_all_dim": 1} if apply_scale else {}),
        ),
    )
    torch.testing.assert_close(features[0].double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize(
    ("params", "tensors", "cause"),
    [
        ({"dim": "24"}, {}, "dim of its params.json is 24, not a whole number"),
        ({"n_heads": True}, {}, "n_heads of its params.json is True"),
        ({"quantization": {"qformat_weight": "nvfp4"}}, {}, "fp8_e4m3 alone is read"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, {"fc.qscale_weight": torch.ones(2)}, "not the one scale"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, {"fc2.qscale_weight": torch.ones(1)}, "not the one scale"),
        ({"moe": {"num_experts": 4}}, {}, "its params.json has moe: heads with experts"),
        ({}, {"vision_encoder.weight": torch.zeros(2)}, "tensor vision_encoder.weight, which an EAGLE head"),
        ({}, {"layers.0.attention.wq.weight": torch.zeros(7, 24)}, r"wq.weight has shape \[7, 24\], and heads of 8"),
        ({}, None, "no config.json, and is no EAGLE head"),
    ],
)
def test_what_is_not_read_of_mistrals_layout(
    params: dict[str, Any], tensors: dict[str, torch.Tensor] | None, cause: str, tmp_path: Path
) -> None:
    written = {"output.weight": torch.zeros(3, 3)} if tensors is None else plain.mistral_eagle_tensors() | tensors
    if tensors and "layers.0.attention.wq.weight" in tensors:
        del written["layers.0.self_attn.q_proj.weight"]
    folder = plain.write_mistral(tmp_path / "head", plain.mistral_params(**params), written)
    with pytest.raises(ModelRefused, match=cause):
        local_model(str(folder), "draft")
    assert not list((tmp_path / "cache").rglob("config.json"))
