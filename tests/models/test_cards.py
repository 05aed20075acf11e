"""The demo models' cards say what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

MODELS = Path("models")
HEADS, HYBRID = "heads-evaluation.json", "hybrid-evaluation.json"


def read(name: str) -> Any:
    return json.loads((MODELS / name).read_text(encoding="utf-8"))


def tables(model: str) -> list[list[list[str]]]:
    """The cells of each table of a card, without its heading."""
    found: list[list[list[str]]] = [[]]
    for line in (MODELS / model / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [table[2:] for table in found if table]


@pytest.mark.parametrize(
    ("model", "source", "key"),
    [
        *((f"demo-{name}", HEADS, f"demo-{name}") for name in ("eagle", "eagle3", "medusa", "mlp-speculator")),
        ("demo-hybrid", HYBRID, "mtp"),
        ("demo-hybrid-eagle3", HYBRID, "eagle3"),
    ],
)
def test_acceptance_by_draft_position(model: str, source: str, key: str) -> None:
    figures = read(source)[key]
    columns = figures["temperature_0"]["agreement"], figures["temperature_1"]["overlap"]
    rows = [[str(at), f"{cold:.3f}", f"{warm:.3f}"] for at, (cold, warm) in enumerate(zip(*columns, strict=True), 1)]
    assert tables(model)[-1] == rows
    assert f"{figures['temperature_0']['positions']:,} positions" in (MODELS / model / "README.md").read_text("utf-8")


@pytest.mark.parametrize("model", ["demo-hybrid", "demo-hybrid-eagle3"])
def test_rounds_and_speed_of_the_hybrids_drafters(model: str) -> None:
    figures = read(HYBRID)
    per_round, served = figures["tokens_per_round"], figures["served"]["temperature_0"]
    rounds, speeds, _ = tables(model)
    drafters = ("mtp", "mtp, untrained", "eagle3", "ngram")
    assert rounds == [[count, *(f"{per_round[name][count]:.2f}" for name in drafters)] for count in per_round["mtp"]]
    assert speeds == [
        [count, *(f"{served[f'{name} {count}']['tokens_per_s']:.0f}" for name in ("mtp", "eagle3", "ngram"))]
        for count in per_round["mtp"]
    ]


def test_the_pair() -> None:
    figures = read("evaluation.json")
    cold, warm = figures["temperature_0"], figures["temperature_1"]
    columns = cold["accepted_tokens_by_draft_len"], warm["accepted_tokens_by_draft_len"]
    rows = [[f"k = {k}", f"{at_0:.2f}", f"{at_1:.2f}"] for k, (at_0, at_1) in enumerate(zip(*columns, strict=True), 1)]
    ((first, *rest),) = tables("demo-draft")
    assert rest == rows
    assert [cell.split()[0] for cell in first[1:]] == [f"{cold['per_token']:.3f}", f"{warm['per_token']:.3f}"]
    for name in ("target", "draft"):
        card = (MODELS / f"demo-{name}" / "README.md").read_text(encoding="utf-8").replace("*", "")
        loss, perplexity = figures["heldout_loss"][name], figures["heldout_perplexity"][name]
        assert f"{loss:.3f} nats per token, perplexity {perplexity:.1f}" in card
