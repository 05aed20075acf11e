"""The comparison of a GGUF file with transformers' reader finds a difference, and corrects what that reader drops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gguf import agreement
from benchmarks.gguf.agreement import differences, generate, has_scaled_rope, oracle
from tests.engine.model.gguf.gguf_writer import VOCABULARY, write_gguf
from tests.engine.tiny_models import SERVED, save_tiny_model

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_YARN_KEYS = {
    "qwen2.rope.scaling.type": "yarn",
    "qwen2.rope.scaling.factor": 4.0,
    "qwen2.rope.scaling.original_context_length": 32,
}
_PROMPTS = [{"prompt_token_ids": [5, 9, 5, 9, 5]}, {"prompt_token_ids": list(range(20, 60))}]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def saved(tmp_path: Path, name: str, **changes: object) -> Path:
    config, arguments = SERVED[name]
    return save_tiny_model(config, {**arguments, "vocab_size": len(VOCABULARY), **changes}, tmp_path / "original")


def test_texts_are_compared_token_by_token(tmp_path: Path) -> None:
    file = write_gguf(saved(tmp_path, "llama"), tmp_path / "model.gguf", "llama")
    texts = generate(file, _PROMPTS, 12, None, 1, max_model_len=128)
    model, whose = oracle(file)
    assert whose == "its own"
    assert [len(text.token_ids) for text in texts] == [12, 12]
    assert differences(model, texts) == []
    changed = list(texts[1].token_ids)
    changed[7] = (changed[7] + 1) % len(VOCABULARY)
    (found,) = differences(model, [texts[0], replace(texts[1], token_ids=changed)])
    assert (found.text, found.place) == (1, 7)
    assert found.logit_gap > 0


def test_rope_scaling_that_transformers_drops_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"use_sliding_window": False, "layer_types": None}
    folder = saved(tmp_path, "qwen2", **plain, rope_parameters=_YARN)
    file = write_gguf(folder, tmp_path / "model.gguf", "qwen2", metadata=_YARN_KEYS)
    assert has_scaled_rope(file)
    token_ids = torch.arange(3, 90)[None]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    corrected, whose = oracle(file)
    assert whose.startswith("ours")
    monkeypatch.setattr(agreement, "has_scaled_rope", lambda _file: False)
    uncorrected, _ = oracle(file)
    with torch.inference_mode():
        wanted, found, dropped = (each(token_ids, use_cache=False).logits for each in (model, corrected, uncorrected))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert not torch.allclose(dropped, wanted, atol=1e-3)
