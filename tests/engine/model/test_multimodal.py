"""Checkpoints of multimodal models whose causal class is that of their text part: text has transformers' logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from multimodal_models import MODELS, random_model

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.model.load import load_model
from outrider.engine.recurrent.rows import StateRows
from outrider.engine.run.runner import ModelRunner

TOKENS = list(range(3, 33))


@pytest.mark.parametrize("name", sorted(MODELS))
@torch.inference_mode()
def test_the_text_part_is_served(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    model.save_pretrained(tmp_path)
    expected = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    loaded = load_model(str(tmp_path))
    runner = ModelRunner(loaded, loaded.make_cache(4, 16), loaded.make_states(1))
    rows = SessionRows(TOKENS, 0, [3, 1], len(TOKENS), state=StateRows(None, (), 0, len(TOKENS)))
    found = runner.forward(build_batch([rows], 16)).logits
    torch.testing.assert_close(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)
