"""Checkpoints of multimodal models whose causal class is that of their text part: text has transformers' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import HYBRIDS, SERVED

from outrider.engine.model.load import load_model
from outrider.engine.recurrent.rows import StateRows
from outrider.engine.run.batch import SessionRows, build_batch
from outrider.engine.run.runner import ModelRunner

TOKENS = list(range(3, 33))
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 80,
    "num_position_embeddings": 16,
}
_LLAMA_VISION = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
# config and model class, text and vision config
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama4": ("Llama4Config", "Llama4ForConditionalGeneration", SERVED["llama4"][1], _LLAMA_VISION),
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", HYBRIDS["qwen3_5"][1], _QWEN_VISION),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        "Qwen3_5MoeForConditionalGeneration",
        HYBRIDS["qwen3_5_moe"][1],
        _QWEN_VISION,
    ),
}


@pytest.mark.parametrize("name", sorted(MODELS))
@torch.inference_mode()
def test_the_text_part_is_served(name: str, tmp_path: Path) -> None:
    config_name, class_name, text, vision = MODELS[name]
    config = getattr(transformers, config_name)(text_config=text, vision_config=vision)
    torch.manual_seed(3)
    model = getattr(transformers, class_name)._from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(tmp_path)
    expected = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    loaded = load_model(str(tmp_path))
    runner = ModelRunner(loaded, loaded.make_cache(4, 16), loaded.make_states(1))
    rows = SessionRows(TOKENS, 0, [3, 1], len(TOKENS), state=StateRows(None, (), 0, len(TOKENS)))
    found = runner.forward(build_batch([rows], 16)).logits
    torch.testing.assert_close(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)
