"""EAGLE-3 folders in every format: what is loaded computes the published equations on the tensors of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.drafting.checkpoints.eagle3 import load_eagle3
from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.recognise import recognise
from outrider.drafting.checkpoints.target_weights import TargetWeights
from tests.drafting.checkpoints import plain_writer as plain
from tests.drafting.heads import plain_math

TOKENS = [3, 36, 0, 5, 5, 9]
STATES = [plain.numbers(len(TOKENS), plain.HIDDEN, seed=910 + place) for place in range(3)]
POSITIONS = [0, 1, 2, 3, 4, 5]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NORMS = {name: plain.numbers(plain.HIDDEN, seed=40 + place) for place, name in enumerate(("low", "mid", "high"))}


def renamed(tensors: plain.Tensors, old: str, new: str) -> plain.Tensors:
    return {name.replace(old, new, 1): tensor for name, tensor in tensors.items()}


def with_qk_norms(tensors: plain.Tensors) -> plain.Tensors:
    names = ("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight")
    return tensors | {name: plain.numbers(plain.HEAD_DIM, seed=50) for name in names}


def full_vocabulary() -> plain.Tensors:
    return plain.eagle3_tensors(draft_vocab=plain.VOCAB)


# name -> (config, tensors under the names of layers.0, whether the residual is normed, RoPE scaling)
FORMATS: dict[str, tuple[dict[str, Any], plain.Tensors, bool, dict[str, Any] | None]] = {
    "raw": (plain.eagle3_config(), plain.eagle3_tensors(), False, None),
    "raw, normed residual": (plain.eagle3_config(norm_before_residual=True), plain.eagle3_tensors(), True, None),
    "raw, full vocabulary": (plain.eagle3_config(draft_vocab_size=None), full_vocabulary(), False, None),
    "modelopt": (plain.modelopt_config(), plain.eagle3_tensors(), False, None),
    "modelopt, norm before fc": (
        plain.modelopt_config(norm_before_fc=True),
        plain.eagle3_tensors() | {"input_norm.weight": plain.numbers(3 * plain.HIDDEN, seed=3)},
        False,
        None,
    ),
    "speculators": (plain.speculators_config(norm_before_residual=False), plain.eagle3_tensors(), False, None),
    "speculators, setting absent": (
        plain.speculators_config(norm_before_residual=None),
        plain.eagle3_tensors(),
        True,
        None,
    ),
    "speculators, norm of each state": (
        plain.speculators_config(fc_norm=True),
        plain.eagle3_tensors() | {f"fc_norm.{place}.weight": norm for place, norm in enumerate(NORMS.values())},
        True,
        None,
    ),
    "speculators, qwen3 layer": (
        plain.speculators_config(transformer_layer_config=plain.llama_config(model_type="qwen3", num_hidden_layers=1)),
        with_qk_norms(plain.eagle3_tensors()),
        True,
        None,
    ),
    "linear RoPE": (
        plain.eagle3_config(rope_scaling={"type": "linear", "factor": 4.0}),
        plain.eagle3_tensors(),
        False,
        {"rope_type": "linear", "factor": 4.0},
    ),
    "llama3 RoPE": (plain.eagle3_config(rope_scaling=LLAMA3), plain.eagle3_tensors(), False, LLAMA3),
}


def check(folder: Path, target: TargetWeights, tensors: plain.Tensors, **reference: Any) -> None:
    """The loaded head against the equations; `reference` is about those."""
    head = load_eagle3(folder, target, torch.float32, attn_implementation="eager")
    scaling = reference.pop("rope_scaling", None)
    of_shape = {"num_layers": reference.pop("num_layers", 1)} | reference.pop("of_shape", {})
    shape = plain_math.Shape(plain.HEADS, plain.KV_HEADS, plain.HEAD_DIM, rope_scaling=scaling, **of_shape)
    theirs = plain_math.doubled(tensors)
    embedding = theirs.get("embed_tokens.weight", plain.target_tensors()["model.embed_tokens.weight"].double())
    fused = plain_math.eagle3_fuse(theirs, [state.double() for state in STATES], shape.eps)
    allowed = plain_math.causal(len(TOKENS))
    wanted, logits = plain_math.eagle3(theirs, embedding, TOKENS, fused, POSITIONS, allowed, shape, **reference)
    with torch.no_grad():
        found_fused = head.fuse(torch.cat(STATES, -1)[None])
        features = head(torch.tensor([TOKENS]), found_fused, torch.tensor([POSITIONS]))
        found_logits = head.logits(features[0])
    torch.testing.assert_close(found_fused[0].double(), fused, atol=1e-5, rtol=0)
    if head.config.norm_output:
        wanted = plain_math.mean_square_norm(wanted, theirs["norm.weight"], shape.eps)
    torch.testing.assert_close(features[0].double(), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(found_logits.double(), logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_computes_the_published_head(name: str, target: TargetWeights, tmp_path: Path) -> None:
    config, tensors, norm_before_residual, scaling = FORMATS[name]
    folder = plain.write(tmp_path, config, tensors)
    assert recognise(folder) == "eagle3"
    check(folder, target, tensors, norm_before_residual=norm_before_residual, rope_scaling=scaling)


def test_the_first_layer_under_its_old_name(target: TargetWeights, tmp_path: Path) -> None:
    tensors = plain.eagle3_tensors()
    folder = plain.write(tmp_path, plain.eagle3_config(), renamed(tensors, "layers.0.", "midlayer."))
    assert recognise(folder) == "eagle3"
    check(folder, target, tensors)


def test_the_norms_of_the_states_under_their_old_names(target: TargetWeights, tmp_path: Path) -> None:
    tensors = plain.eagle3_tensors()
    old = {f"aux_norm_{name}.weight": norm for name, norm in NORMS.items()}
    new = {f"fc_norm.{place}.weight": norm for place, norm in enumerate(NORMS.values())}
    folder = plain.write(tmp_path, plain.eagle3_config(), tensors | old)
    check(folder, target, tensors | new)


def test_norm_output_puts_the_norm_into_the_feature(target: TargetWeights, tmp_path: Path) -> None:
    folder = plain.write(tmp_path, plain.speculators_config(norm_output=True), plain.eagle3_tensors())
    check(folder, target, plain.eagle3_tensors(), norm_before_residual=True)


def test_two_layers_and_biases(target: TargetWeights, tmp_path: Path) -> None:
    further = plain.layer_tensors("layers.1", seed=60, qkv_bias=True)
    tensors = plain.eagle3_tensors() | plain.layer_tensors("layers.0", 2 * plain.HIDDEN, qkv_bias=True) | further
    tensors["layers.1.input_layernorm.weight"] = plain.numbers(plain.HIDDEN, seed=61)
    tensors["fc.bias"] = plain.numbers(plain.HIDDEN, seed=62)
    folder = plain.write(tmp_path, plain.eagle3_config(num_hidden_layers=2, attention_bias=True), tensors)
    check(folder, target, tensors, num_layers=2)


YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize("scaling", [None, YARN])
@pytest.mark.parametrize("has_query_latent", [True, False])
def test_latent_attention(
    scaling: dict[str, Any] | None, has_query_latent: bool, target: TargetWeights, tmp_path: Path
) -> None:
    """As lightseekorg/kimi-k2.6-eagle3-mla has it."""
    tensors = plain.with_latents(plain.eagle3_tensors(), has_query_latent=has_query_latent)
    sizes = plain.latent_sizes(**({} if has_query_latent else {"q_lora_rank": None}))
    config = plain.eagle3_config(**sizes, rope_scaling=scaling, architectures=["Eagle3DeepseekV2ForCausalLM"])
    folder = plain.write(tmp_path, config, renamed(tensors, "layers.0.", "midlayer."))
    assert recognise(folder) == "eagle3"
    of_shape = {"key_dim": plain.KEY_DIM, "value_dim": plain.VALUE_DIM, "rotates_neighbours": True}
    check(folder, target, tensors, rope_scaling=scaling, of_shape=of_shape)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"v_head_dim": 8}, "v_head_dim is 8, not a whole number from 16 to 4096"),
        ({"kv_lora_rank": 8}, "kv_lora_rank is 8, not a whole number from 16 to 4096"),
        ({"qk_nope_head_dim": 4}, "qk_nope_head_dim is 4, not at least 16 with qk_rope_head_dim, 8"),
    ],
)
def test_latents_too_narrow_for_the_kernels_are_refused_when_read(
    change: dict[str, int], refusal: str, target: TargetWeights, tmp_path: Path
) -> None:
    """Their first forward would fail, in a request."""
    config = plain.eagle3_config(**plain.latent_sizes(**change), architectures=["Eagle3DeepseekV2ForCausalLM"])
    tensors = plain.with_latents(plain.eagle3_tensors())
    folder = plain.write(tmp_path, config, renamed(tensors, "layers.0.", "midlayer."))
    with pytest.raises(CheckpointRefused, match=refusal):
        load_eagle3(folder, target, torch.float32)


def test_an_embedding_of_its_own_is_used(target: TargetWeights, tmp_path: Path) -> None:
    tensors = plain.eagle3_tensors() | {"embed_tokens.weight": plain.numbers(plain.VOCAB, plain.HIDDEN, seed=8)}
    check(plain.write(tmp_path, plain.eagle3_config(), tensors), target, tensors)


def test_draft_ids_become_target_ids_by_their_offsets(target: TargetWeights, tmp_path: Path) -> None:
    head = load_eagle3(plain.write(tmp_path, plain.eagle3_config(), plain.eagle3_tensors()), target, torch.float32)
    assert head.target_ids is not None
    assert head.target_ids.tolist() == [3 * draft_id for draft_id in range(plain.DRAFT_VOCAB)]


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (plain.eagle3_config(), (2, 3, 3)),
        (plain.modelopt_config(), (1, 2, 4)),
        (plain.eagle3_config(eagle_aux_hidden_state_layer_ids=[0, 2, 5]), (0, 2, 5)),
        (plain.speculators_config(eagle_aux_hidden_state_layer_ids=[1, 3, 4]), (1, 3, 4)),
    ],
)
def test_which_hidden_states_it_reads(
    config: dict[str, Any], layers: tuple[int, ...], target: TargetWeights, tmp_path: Path
) -> None:
    head = load_eagle3(plain.write(tmp_path, config, plain.eagle3_tensors()), target, torch.float32)
    assert head.feature_layers == layers


def test_four_hidden_states(target: TargetWeights, tmp_path: Path) -> None:
    config = plain.eagle3_config(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4], num_aux_hidden_states=4)
    head = load_eagle3(plain.write(tmp_path, config, plain.eagle3_tensors(num_aux=4)), target, torch.float32)
    assert head.fuse(torch.zeros(2, 4 * plain.HIDDEN)).shape == (2, plain.HIDDEN)


def test_the_targets_own_head_and_last_state_where_the_checkpoint_has_none(
    target: TargetWeights, tmp_path: Path
) -> None:
    tensors = full_vocabulary()
    del tensors["fc.weight"], tensors["lm_head.weight"]
    config = plain.eagle3_config(draft_vocab_size=None, eagle_config={"use_aux_hidden_state": False})
    head = load_eagle3(plain.write(tmp_path, config, tensors), target, torch.float32)
    assert head.feature_layers == (plain.NUM_TARGET_LAYERS,)
    assert torch.equal(head.fuse(STATES[0]), STATES[0])
    assert head.lm_head.weight.data_ptr() == target.lm_head.data_ptr()


@pytest.mark.parametrize(
    ("config", "token"),
    [
        (plain.eagle3_config(ptd_token_id="5", architectures=["LlamaForCausalLMEagle3"]), 5),
        (plain.speculators_config(speculators_model_type="peagle", mask_token_id=6, norm_before_residual=None), 6),
    ],
)
def test_a_head_with_masks_computes_the_published_one(
    config: dict[str, Any], token: int, target: TargetWeights, tmp_path: Path
) -> None:
    """P-EAGLE: rows of a mask are rows like any other, of its token and its learned hidden state."""
    width = 3 * plain.HIDDEN
    own = {"embed_tokens.weight": plain.numbers(plain.VOCAB, plain.HIDDEN, seed=8)}
    tensors = plain.eagle3_tensors() | own
    mask_hidden = plain.numbers(1, width, seed=9)
    folder = plain.write(tmp_path, config, tensors | {"mask_hidden": mask_hidden[None]})
    assert recognise(folder) == "eagle3"
    check(folder, target, tensors)
    head = load_eagle3(folder, target, torch.float32, attn_implementation="eager")
    assert head.config.mask_token_id == token
    with torch.no_grad():
        feature = head.fuse(head.mask_hidden[None])
    theirs = plain_math.eagle3_fuse(
        plain_math.doubled(tensors), list(mask_hidden.double().split(plain.HIDDEN, -1)), 1e-5
    )
    torch.testing.assert_close(feature.double(), theirs, atol=1e-5, rtol=0)
