"""Checkpoints of multimodal models: their text has the logits of transformers' whole model; new kinds are certified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from multimodal_models import MODELS, OWN_CLASS, random_model, save_as_published
from safetensors.torch import load_file, save_file

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.certificate import certify
from outrider.engine.errors import ModelRefused
from outrider.engine.model.load import load_model
from outrider.engine.model.text_part import text_tensors
from outrider.engine.recurrent.rows import StateRows
from outrider.engine.run.runner import ModelRunner

TOKENS = list(range(3, 33))
# Each way to a class and to the weights' names; the rest are storm tests.
SOME = (
    *OWN_CLASS,
    *("dots3_note", "glm_ocr", "kimi_k25", "lfm2_vl", "minimax_m3_vl", "mistral3 ministral3", "mistral3 mistral4"),
)


@pytest.mark.parametrize(
    "name", [*SOME, *(pytest.param(name, marks=pytest.mark.storm) for name in MODELS if name not in SOME)]
)
@torch.inference_mode()
def test_the_text_part_is_served(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    save_as_published(model, tmp_path)
    expected = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    loaded = load_model(str(tmp_path), dtype="float32")
    runner = ModelRunner(loaded, loaded.make_cache(8, 16), loaded.make_states(1))
    rows = SessionRows(TOKENS, 0, [3, 1], len(TOKENS), state=StateRows(None, (), 0, len(TOKENS)))
    found = runner.forward(build_batch([rows], 16)).logits
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    assert name not in SOME or name in OWN_CLASS or certify(loaded, runner).holds


@torch.inference_mode()
def test_a_wrapper_that_transformers_lacks_is_read_as_one_with_the_same_text_model(tmp_path: Path) -> None:
    """Intern-S2: Qwen3.5's text model and images, with time series beside them."""
    model = random_model("qwen3_5_moe")
    save_as_published(model, tmp_path)
    expected = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    config = json.loads((tmp_path / "config.json").read_text())
    own = {"model_type": "intern_s2_preview", "auto_map": {"AutoConfig": "configuration.Config"}, "ts_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config | own))
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.time_series.norm.weight": torch.zeros(8)}, file, {"format": "pt"})
    loaded = load_model(str(tmp_path), dtype="float32")
    runner = ModelRunner(loaded, loaded.make_cache(8, 16), loaded.make_states(1))
    rows = SessionRows(TOKENS, 0, [3, 1], len(TOKENS), state=StateRows(None, (), 0, len(TOKENS)))
    found = runner.forward(build_batch([rows], 16)).logits
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


def test_a_text_part_that_lacks_its_head_is_refused(tmp_path: Path) -> None:
    """Neither of its configs ties it to the embedding."""
    with torch.inference_mode():
        save_as_published(random_model("kimi_k25"), tmp_path)
    file = tmp_path / "model.safetensors"
    config = json.loads((tmp_path / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: part for name, part in load_file(file).items() if "lm_head" not in name}, file, {"format": "pt"})
    with pytest.raises(ModelRefused, match="lm_head"):
        load_model(str(tmp_path), dtype="float32")


def test_only_the_text_part_is_read() -> None:
    published = ("language_model.model.norm.weight", "language_model.lm_head.weight", "vision_tower.norm.weight")
    assert text_tensors(dict.fromkeys(published, 0)) == {"model.norm.weight": 0, "lm_head.weight": 0}
    current = ("model.language_model.norm.weight", "model.visual.norm.weight", "lm_head.weight")
    assert text_tensors(dict.fromkeys(current, 0)) == {"model.norm.weight": 0, "lm_head.weight": 0}
