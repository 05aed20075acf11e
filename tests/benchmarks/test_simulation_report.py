"""The sizing rule against the simulation, and how tables and pictures come into docs/scaling.md."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.simulation import plots, report, sizing
from benchmarks.simulation.costs import Domain
from benchmarks.simulation.fleet import Arrivals, Scenario, simulate
from benchmarks.simulation.session import Link
from tests.benchmarks.simulated_costs import make_costs

pytestmark = pytest.mark.storm

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
COSTS = make_costs(draft_step=((1, 0.001), (64, 0.003)), draft_fixed_s=0.001, trip_s=0.001)


def test_the_break_even_is_where_the_simulation_has_it() -> None:
    limit_s, length = sizing.break_even_s(COSTS, "code")
    stream = Scenario(1, 1, "off", 1.0, Arrivals.STREAMS, num_tokens=2000, seconds=100.0, cached_prompts=True)
    off = simulate(stream, COSTS).tokens_per_s
    nearer, farther = (
        simulate(dataclasses.replace(stream, method=f"fixed:{length}", link=Link(share * limit_s)), COSTS).tokens_per_s
        for share in (0.9, 1.1)
    )
    assert nearer > off > farther


def test_a_draft_that_is_never_right_never_pays() -> None:
    costs = dataclasses.replace(COSTS, domains={"code": Domain(8, (10,), ((0, 0, 0),))})
    assert sizing.break_even_s(costs, "code")[0] < 0.0
    assert sizing.break_even_table(costs)[1][-1] == "never"


def test_a_drafter_bears_about_as_many_verifiers_as_the_rule_says() -> None:
    """Half as many lose little, four times as many lose a lot."""
    costs = make_costs(draft_step=((1, 0.002), (8, 0.002), (64, 0.012)), trip_s=0.001)
    rule = sizing.round_s(costs, 4, 4) / sizing.draft_s(costs, 4, 4)
    assert 3.0 < rule < 5.0

    def tokens_per_s(verifiers_per_drafter: int) -> float:
        scenario = Scenario(16, 16 // verifiers_per_drafter, "fixed:4", 4.0, Arrivals.STREAMS, seconds=10.0)
        return simulate(dataclasses.replace(scenario, cached_prompts=True), costs).tokens_per_s

    own = tokens_per_s(1)
    assert tokens_per_s(2) > 0.85 * own
    assert tokens_per_s(16) < 0.85 * own


def test_tables_go_between_their_marks_and_nowhere_else() -> None:
    text = "before\n<!-- one -->\nold\n<!-- end -->\nbetween\n<!-- two -->\n<!-- end -->\nafter"
    once = report.fill(text, {"one": [["a", "b"], ["1", "2"]], "two": [["a"]]})
    assert once == (
        "before\n<!-- one -->\n| a | b |\n| --- | --- |\n| 1 | 2 |\n<!-- end -->\nbetween\n"
        "<!-- two -->\nNot measured yet.\n<!-- end -->\nafter"
    )
    assert report.fill(once, {"one": [["a", "b"], ["1", "2"]], "two": [["a"]]}) == once


def test_only_the_newest_run_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert report.newest_run(path) == []
    path.write_text("".join(json.dumps({"time": time, "n": n}) + "\n" for time, n in (("1", 1), ("2", 2), ("2", 3))))
    assert [row["n"] for row in report.newest_run(path)] == [2, 3]


def test_every_picture_is_drawn_and_drawn_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in {"RTTS_MS": (0.0, 20.0), "NUM_SHARED": (4, 16), "LOADS": (0.5,), "FLEETS": (1, 3)}.items():
        monkeypatch.setattr(sizing, name, values)
    measured = [{"variant": "auto", "jitter": 0.0, "rtt_ms": 0.0, "of_off": 1.5}]
    drawn = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        plots.remote_drafting(sizing.remote_drafting(COSTS, 2.0), measured, folder / "rtt.svg")
        plots.shared_drafters(sizing.shared_drafters(COSTS, 2.0), folder / "drafters.svg")
        plots.loads(sizing.loads(COSTS, 5.0), folder / "load.svg")
        drawn.append([path.read_bytes() for path in sorted(folder.iterdir())])
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 3
    assert all(picture.startswith(b"<?xml") for picture in drawn[0])
    assert len(sizing.fleets_table(sizing.fleets(COSTS, 4.0))) == 3


def test_the_page_has_a_mark_for_every_table() -> None:
    rows: list[list[str]] = [["a"], ["1"]]
    names = ("costs", "break-even", "drafters", "load", "fleets", "validation", "round-trip", "wire")
    filled = report.fill(PAGE.read_text(), dict.fromkeys(names, rows))
    assert filled.count("| 1 |") == len(names)
