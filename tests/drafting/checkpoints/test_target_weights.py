"""The target's embedding and output head: from every family's names, and nothing else of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from outrider.drafting.checkpoints.eagle import load_eagle
from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.medusa import load_medusa
from outrider.drafting.checkpoints.target_weights import load_target_weights
from outrider.engine.attention.layer import register_attention
from tests.drafting.checkpoints import plain_writer as plain
from tests.engine.model.multimodal_models import random_model, save_as_published

_SIZES = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {"vocab_size": 41, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES),
    "llama, tied": ("LlamaConfig", {**_SIZES, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**_SIZES, "head_dim": 8}),
    "mixtral": ("MixtralConfig", {**_SIZES, "num_local_experts": 2, "head_dim": 8}),
    "qwen2": ("Qwen2Config", _SIZES),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 8}),
    "phi": ("PhiConfig", _SIZES),
    "gpt2": ("GPT2Config", _GPT2),
    "gpt_neox": ("GPTNeoXConfig", {key: size for key, size in _SIZES.items() if key != "num_key_value_heads"}),
    "opt": (
        "OPTConfig",
        {**{key: _SIZES[key] for key in ("vocab_size", "hidden_size")}, "word_embed_proj_dim": 32, "ffn_dim": 48}
        | {"num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_matrices_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    name, arguments = FAMILIES[family]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**arguments))
    model.save_pretrained(tmp_path, max_shard_size="20KB")  # sharded, with an index
    target = load_target_weights(tmp_path, torch.float32)
    assert torch.equal(target.embedding, model.get_input_embeddings().weight)
    assert torch.equal(target.lm_head, model.get_output_embeddings().weight)
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (41, 32, 2)
    assert target.architecture == type(model).__name__
    if model.config.tie_word_embeddings:
        assert target.lm_head is target.embedding
    assert (target.lm_head_extra is not None) == (family == "phi"), "phi's output head has a bias"


_MOE = {
    "vocab_size": plain.VOCAB,
    "hidden_size": plain.HIDDEN,
    "intermediate_size": 40,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": 0,
    "num_nextn_predict_layers": 1,
}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
# family -> config class, arguments, and where its files have the layer for multi-token prediction
WITH_MTP: dict[str, tuple[str, dict[str, Any], str]] = {
    "glm4_moe": ("Glm4MoeConfig", {**_MOE, "num_key_value_heads": 2, "head_dim": 8}, "model.layers.2"),
    "deepseek_v3": ("DeepseekV3Config", {**_MOE, **_LATENT, "num_key_value_heads": 4}, "model.layers.2"),
    "under mtp": ("LlamaConfig", {**_SIZES, "vocab_size": plain.VOCAB, "hidden_size": plain.HIDDEN}, "mtp"),
}


def write_target_with_mtp(family: str, folder: Path) -> Any:
    """A tiny model's files with such a layer, its copies of embedding and head under the published names; returns the
    model. The layer's own numbers differ from the model's."""
    name, arguments, layer = WITH_MTP[family]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**arguments))
    model.save_pretrained(folder)
    copies = {
        "embed_tokens.weight": plain.VOCAB,
        "shared_head.head.weight": plain.VOCAB,
        "eh_proj.weight": plain.HIDDEN,
    }
    tensors = {f"{layer}.{end}": plain.numbers(size, plain.HIDDEN, seed=size) for end, size in copies.items()}
    tensors |= {f"{layer}.{end}.weight": plain.numbers(plain.HIDDEN) for end in ("enorm", "hnorm", "shared_head.norm")}
    # A second file without an index, as in a folder to which the layer was added.
    save_file(tensors, folder / "mtp.safetensors")
    return model


@pytest.mark.parametrize("family", WITH_MTP)
def test_heads_find_the_targets_embedding_beside_that_of_its_mtp_layer(family: str, tmp_path: Path) -> None:
    model = write_target_with_mtp(family, tmp_path / "target")
    target = load_target_weights(tmp_path / "target", torch.float32)
    assert torch.equal(target.embedding, model.get_input_embeddings().weight)
    assert torch.equal(target.lm_head, model.get_output_embeddings().weight)
    folder = plain.write(tmp_path / "eagle", plain.eagle1_config(), plain.eagle1_tensors())
    register_attention()
    assert torch.equal(load_eagle(folder, target, torch.float32).embed_tokens.weight, target.embedding)
    config = plain.medusa_config(2, 1)
    folder = plain.write(tmp_path / "medusa", config, plain.medusa_vllm_tensors(2, 1))
    load_medusa(folder, target, torch.float32)


def test_the_matrices_of_a_wrapper_that_ties_them_itself(tmp_path: Path) -> None:
    """Mistral 3's config ties by default, its text config does not."""
    with torch.no_grad():
        model = random_model("mistral3 ministral3")
    assert (model.config.tie_word_embeddings, model.config.text_config.tie_word_embeddings) == (True, False)
    found = load_target_weights(save_as_published(model, tmp_path))
    assert torch.equal(found.embedding, model.get_input_embeddings().weight)
    assert torch.equal(found.lm_head, model.get_output_embeddings().weight)


def test_the_dtype_is_the_stored_one_unless_another_is_asked_for(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in plain.target_tensors().items()}
    plain.write(tmp_path, plain.llama_config(), tensors)
    assert load_target_weights(tmp_path).embedding.dtype == torch.bfloat16
    assert load_target_weights(tmp_path, torch.float32).lm_head.dtype == torch.float32


def without(name: str) -> plain.Tensors:
    return {key: tensor for key, tensor in plain.target_tensors().items() if key != name}


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (plain.llama_config(), without("model.embed_tokens.weight"), r"no input embedding: looked for \*embed_tokens"),
        (plain.llama_config(), without("lm_head.weight"), r"no output head .*looked for \*lm_head\.weight"),
        (
            plain.llama_config(vocab_size=38),
            plain.target_tensors(),
            r"model\.embed_tokens\.weight has shape \[37, 24\], the config says \[38, 24\]",
        ),
        (
            plain.llama_config(),
            plain.target_tensors() | {"lm_head.weight": plain.numbers(37, 23)},
            r"lm_head\.weight has shape \[37, 23\], the config says \[37, 24\]",
        ),
        (
            plain.llama_config(),
            plain.target_tensors() | {"visual.embed_tokens.weight": plain.numbers(3, 3)},
            r"several tensors match: model\.embed_tokens\.weight, visual\.embed_tokens\.weight",
        ),
        (plain.llama_config(model_type="no-such-model"), plain.target_tensors(), "its config cannot be read"),
        (plain.llama_config(hidden_size="24"), plain.target_tensors(), "hidden_size"),
        (plain.llama_config(num_hidden_layers=-1), plain.target_tensors(), "num_hidden_layers"),
    ],
)
def test_what_cannot_be_found_is_refused(
    config: dict[str, Any], tensors: plain.Tensors, message: str, tmp_path: Path
) -> None:
    plain.write(tmp_path, config, tensors)
    with pytest.raises(CheckpointRefused, match=message):
        load_target_weights(tmp_path)


def test_a_biased_output_head_is_not_shared(tmp_path: Path) -> None:
    """Heads that end in the target's lm_head would silently lack the bias."""
    target_dir, folder = tmp_path / "target", tmp_path / "heads"
    plain.write(target_dir, plain.llama_config(), plain.target_tensors() | {"lm_head.bias": torch.ones(plain.VOCAB)})
    tensors = {name: found for name, found in plain.medusa_vllm_tensors(2, 1).items() if name.startswith("blocks")}
    plain.write(folder, plain.medusa_config(2, 1, original_lm_head=True), tensors)
    with pytest.raises(CheckpointRefused, match=r"applies a bias \(lm_head\.bias\) after it"):
        load_medusa(folder, load_target_weights(target_dir), torch.float32)
