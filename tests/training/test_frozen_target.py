"""The target's hidden layers carry transformers' numbers, whatever files it is in.

Oracle: transformers' own output_hidden_states, and its reader of GGUF.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, GraniteConfig, LlamaConfig, MixtralConfig

from outrider.drafting.checkpoints.target_weights import load_target_weights
from outrider.engine.model.local_model import local_model
from outrider.training.errors import SettingError
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.read_out import read_out_logits
from outrider.training.train import target_fingerprint
from tests.engine.model.gguf.gguf_writer import VOCABULARY, write_gguf
from tests.training.tiny import NUM_LAYERS, VOCAB_SIZE, write_target


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def test_features_equal_hidden_states(target_dir: Path) -> None:
    token_ids = torch.arange(20).reshape(2, 10) % VOCAB_SIZE
    model = AutoModelForCausalLM.from_pretrained(target_dir)
    with torch.no_grad():
        wanted = model(token_ids, output_hidden_states=True, use_cache=False)
    target = FrozenTarget(target_dir)
    layers = (0, 2, NUM_LAYERS - 1, NUM_LAYERS)
    view = target.view(token_ids, layers)
    assert torch.equal(view.features, torch.cat([wanted.hidden_states[layer] for layer in layers], dim=-1))
    assert torch.equal(view.final, wanted.hidden_states[-1])
    logits = view.read_out(view.final.flatten(0, 1))
    assert torch.allclose(logits, wanted.logits.flatten(0, 1), atol=1e-5)
    assert torch.allclose(view.final.flatten(0, 1) @ target.lm_head.T, logits, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    # The hooks are gone: another view asks for others.
    assert torch.equal(target.view(token_ids, (3,)).features, wanted.hidden_states[3])


def test_a_gguf_target_is_the_model_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers dequantises it on its own; heads read the target's embedding from the same folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    sizes = {"vocab_size": len(VOCABULARY), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    file = write_gguf(tmp_path / "plain", tmp_path / "model.gguf", "llama", "Q8_0")
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    token_ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        wanted = oracle(token_ids, output_hidden_states=True, use_cache=False).hidden_states
    folder = Path(local_model(str(file), "--target"))
    view = FrozenTarget(folder, torch.float32).view(token_ids, (2, 3, 6))
    assert torch.equal(view.features, torch.cat([wanted[layer] for layer in (2, 3, 6)], dim=-1))
    weights = load_target_weights(folder, torch.float32)
    assert torch.equal(weights.embedding, oracle.get_input_embeddings().weight)
    assert weights.lm_head is weights.embedding


def test_a_target_in_bin_files(target_dir: Path, tmp_path: Path) -> None:
    shutil.copy(target_dir / "config.json", tmp_path)
    torch.save(load_file(target_dir / "model.safetensors"), tmp_path / "pytorch_model.bin")
    token_ids = torch.arange(20).reshape(2, 10) % VOCAB_SIZE
    views = [FrozenTarget(folder).view(token_ids, (2,)) for folder in (target_dir, tmp_path)]
    assert torch.equal(views[0].features, views[1].features)
    assert target_fingerprint(tmp_path) != target_fingerprint(target_dir)


def test_logits_are_scaled_and_capped_as_the_model_does() -> None:
    """Gemma 2 caps its logits, Granite divides them, GPT-2's and Mixtral's bodies return more than hidden states."""
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    sizes = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **ids}
    heads = {"intermediate_size": 48, "num_key_value_heads": 2}
    configs = [
        Gemma2Config(**sizes, **heads, head_dim=8, final_logit_softcapping=0.5),
        GraniteConfig(**sizes, **heads, logits_scaling=7.0),
        GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, **ids),
        MixtralConfig(**sizes, **heads, num_local_experts=2),
    ]
    token_ids, some_ids = torch.arange(20).reshape(2, 10), torch.tensor([7, 0, 31])
    for config in configs:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            wanted = model(token_ids, output_hidden_states=True, use_cache=False)
            logits = read_out_logits(model, wanted.hidden_states[-1].flatten(0, 1))
            some = read_out_logits(model, wanted.hidden_states[-1].flatten(0, 1), some_ids)
        assert torch.allclose(logits, wanted.logits.flatten(0, 1), atol=1e-6), config.model_type
        assert torch.allclose(some, logits[:, some_ids], atol=1e-6), config.model_type
        assert torch.equal(model(token_ids, use_cache=False).logits, wanted.logits), config.model_type


def test_padding_on_the_right_changes_nothing_before_it(target_dir: Path) -> None:
    target = FrozenTarget(target_dir)
    row = torch.arange(12)[None] % VOCAB_SIZE
    padded = torch.cat([row, torch.zeros(1, 5, dtype=torch.long)], dim=1)
    alone, beside = target.view(row, (2, NUM_LAYERS)), target.view(padded, (2, NUM_LAYERS))
    assert torch.allclose(alone.features, beside.features[:, :12], atol=1e-5)
    assert torch.allclose(alone.final, beside.final[:, :12], atol=1e-5)


def test_what_cannot_be(target_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"hidden layers 0 to 6, not \[7\]"):
        FrozenTarget(target_dir).view(torch.zeros(1, 4, dtype=torch.long), (2, 7))
    with pytest.raises(SettingError, match="is not a checkpoint folder"):
        FrozenTarget(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(SettingError, match="cannot be loaded"):
        FrozenTarget(tmp_path)
