"""A head's card says what was measured and how it was made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from models.make.head_cards import WHAT, card_text
from models.make.make_heads import HEADS, data_files
from outrider.training.errors import CorpusError


def test_a_card_holds_the_figures(tmp_path: Path) -> None:
    work_dir, models_dir = tmp_path / "work", tmp_path / "models"
    models_dir.mkdir()
    run_dir = work_dir / "heads" / "medusa"
    run_dir.mkdir(parents=True)
    with pytest.raises(CorpusError, match=r"heads-evaluation.json is missing"):
        card_text("medusa", (), work_dir, models_dir)
    for path in data_files(work_dir):
        np.save(path, np.zeros((20, 4), dtype=np.uint16))
    cold = {"agreement": [0.5, 0.25], "overlap": [0.1, 0.2], "positions": 1234}
    warm = {"agreement": [0.3, 0.4], "overlap": [0.625, 0.125], "positions": 1234}
    figures = {"method": "medusa", "bytes": 3_400_000, "temperature_0": cold, "temperature_1": warm}
    (models_dir / "heads-evaluation.json").write_text(json.dumps({"demo-medusa": figures}))
    settings = {"optimization": {"batch_size": 6, "accumulation": 2}, "seq_len": 256}
    (run_dir / "run.json").write_text(json.dumps(settings))
    (run_dir / "train.jsonl").write_text('{"step": 5}\n{"step": 10}\n')
    (work_dir / "heads-medusa.done").write_text('{"seconds": 600.0}')
    card = card_text("medusa", ("--steps", "10"), work_dir, models_dir)
    assert "# demo-medusa" in card
    assert "3.4 MB" in card
    assert "10 steps of 12 windows of up to 256 tokens (2.0 epochs) on CPU, 10 minutes" in card
    assert "| 1 | 0.500 | 0.625 |\n| 2 | 0.250 | 0.125 |" in card
    assert "1,234 positions" in card
    assert "`--steps 10`" in card


def test_every_head_has_words() -> None:
    assert {head.name for head in HEADS} == set(WHAT)
