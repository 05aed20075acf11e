"""The hybrid's cards say what was measured and how it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from models.make import hybrid_card
from models.make.hybrid_card import card_texts
from outrider.training.errors import CorpusError

FIGURES: dict[str, Any] = {
    "parameters": {"target": 1_790_360, "mtp": 333_728, "eagle3": 800_000},
    "held_out_prompts": 64,
    "tokens_per_round": {
        "mtp": {"1": 1.5, "3": 2.126},
        "mtp, untrained": {"1": 1.01, "3": 1.02},
        "eagle3": {"1": 1.6, "3": 2.4},
        "ngram": {"1": 1.7, "3": 2.8},
    },
    "mtp": {
        "temperature_0": {"agreement": [0.5, 0.25], "overlap": [0.9, 0.9], "positions": 12_288},
        "temperature_1": {"agreement": [0.9, 0.9], "overlap": [0.625, 0.125], "positions": 12_288},
    },
    "eagle3": {
        "temperature_0": {"agreement": [0.75, 0.375], "overlap": [0.9, 0.9], "positions": 12_000},
        "temperature_1": {"agreement": [0.9, 0.9], "overlap": [0.5, 0.25], "positions": 12_000},
    },
}
HISTORY = [{"step": 20, "seconds": 60.0, "heldout": 9.0}, {"step": 480, "seconds": 1440.0, "heldout": 3.7401}]
MTP_RUN = {
    "optimization": {"steps": 260, "batch_size": 4, "accumulation": 2},
    "seq_len": 256,
    "head": {"ttt_steps": 3},
}
EAGLE3_RUN = {"optimization": {"steps": 400, "batch_size": 4, "accumulation": 1}, "seq_len": 128, "head": {}}


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path]:
    """The folders of the runs and of the models, as the steps of make_hybrid leave them."""
    work, models = tmp_path / "work", tmp_path / "models"
    for folder in (work / "hybrid" / "mtp", work / "hybrid" / "eagle3", models / "demo-hybrid"):
        folder.mkdir(parents=True)
    (models / "demo-hybrid-eagle3").mkdir()
    (models / "demo-hybrid-eagle3" / "model.safetensors").write_bytes(bytes(1_700_000))
    for path, value in {
        models / "hybrid-evaluation.json": FIGURES,
        work / "hybrid-history.json": HISTORY,
        work / "hybrid" / "mtp" / "run.json": MTP_RUN,
        work / "hybrid" / "eagle3" / "run.json": EAGLE3_RUN,
        work / "hybrid-mtp.done": {"seconds": 720.0},
        work / "hybrid-eagle3.done": {"seconds": 1500.0},
    }.items():
        path.write_text(json.dumps(value))
    for name, num_rows in (("own.npy", 30), ("corpus.npy", 10)):
        np.save(work / "hybrid" / name, np.zeros((num_rows, 4), dtype=np.uint16))
    return work, models


def rows_of(card: str) -> list[list[str]]:
    """The cells of all tables, headings included."""
    lines = [line for line in card.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_models_card_holds_the_figures(made: tuple[Path, Path]) -> None:
    card = card_texts(*made)["demo-hybrid"]
    assert "\n\n\n" not in card
    assert "A hybrid of 1.8 M parameters" in card
    assert "an MTP layer of 0.33 M more" in card
    assert "0.98 M tokens in 480 steps of 2,048" in card
    assert "the last part 1,024), 24 minutes" in card
    assert "**3.740** nats per token" in card
    assert "260 steps of 8 windows of up to 256 tokens" in card
    assert "3 steps of training-time test, 12 minutes. 75 % of the windows" in card
    assert "continuations of 64 held-out prompts" in card
    assert "(12,288 positions at the first)" in card
    assert rows_of(card) == [
        ["drafted per round", "`mtp`", "the same layer untrained", "`eagle3`", "`ngram`"],
        ["1", "1.50", "1.01", "1.60", "1.70"],
        ["3", "2.13", "1.02", "2.40", "2.80"],
        ["draft position", "temperature 0: argmaxes agree", "temperature 1: 1 - total variation"],
        ["1", "0.500", "0.625"],
        ["2", "0.250", "0.125"],
    ]


def test_the_heads_card_holds_its_own(made: tuple[Path, Path]) -> None:
    card = card_texts(*made)["demo-hybrid-eagle3"]
    assert card.startswith("# demo-hybrid-eagle3\n")
    assert "1.7 MB in bf16" in card
    assert "400 steps of 4 windows of up to 128 tokens on CPU, 25 minutes" in card
    assert "(12,000 positions at the first)" in card
    assert rows_of(card)[1:3] == rows_of(card_texts(*made)["demo-hybrid"])[1:3]
    assert rows_of(card)[-2:] == [["1", "0.750", "0.500"], ["2", "0.375", "0.250"]]


def test_speeds_are_there_once_measured(made: tuple[Path, Path]) -> None:
    cards = card_texts(*made)
    assert not any("per second" in card for card in cards.values())
    names = [f"{method} {count}" for method in ("mtp", "eagle3", "ngram") for count in (1, 3)]
    speeds = {name: {"tokens_per_s": 100.0 + place} for place, name in enumerate(["off", *names])}
    served = {"temperature_0": speeds, "temperature_1": {}}
    (made[1] / "hybrid-evaluation.json").write_text(json.dumps(FIGURES | {"served": served}))
    for card in card_texts(*made).values():
        assert "off 100:" in card
        assert ["1", "101", "103", "105"] in rows_of(card)
        assert ["3", "102", "104", "106"] in rows_of(card)
        assert "\n\n\n" not in card


def test_the_command_writes_both(made: tuple[Path, Path]) -> None:
    work, models = made
    app = hybrid_card.typer.Typer()
    app.command()(hybrid_card.main)
    done = CliRunner().invoke(app, ["--work-dir", str(work), "--models-dir", str(models)])
    assert done.exit_code == 0, done.output
    for name, text in card_texts(work, models).items():
        assert (models / name / "README.md").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("step", ["hybrid-evaluation.json", "hybrid-history.json", "hybrid-eagle3.done"])
def test_a_step_that_has_not_been_run_is_named(made: tuple[Path, Path], step: str) -> None:
    for folder in made:
        (folder / step).unlink(missing_ok=True)
    with pytest.raises(CorpusError, match=step):
        card_texts(*made)
