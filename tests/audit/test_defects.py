"""The audit finds what is planted in a fake server, and nothing in a correct one."""

from __future__ import annotations

import pytest

from tests.audit.fake_sampler import DEFECTS
from tests.audit.power import audited, broken

# Defect -> the kind of test that must find it. Noise and small shifts need more tokens than these runs have.
_FOUND_BY = {
    "argmax": "law",
    "typical": "law",
    "bonus_greedy": "law",
    "only_nolp": "greedy",
    "temp_twice": "law",
    "topp_ignored": "law",
    "draftlaw": "law",
    "lenient": "greedy",
    "stale_kv": "greedy",
    "lp_draft": "logprobs",
    "lp_zero": "logprobs",
    "bias_stale": "fields",
    "pen_stale": "fields",
    "min_tokens": "fields",
    "overshoot": "fields",
    "stop_cross": "fields",
    "tool_garble": "tools",
}
_QUICK = ("lp_zero", "stop_cross", "lenient", "tool_garble")


@pytest.mark.parametrize("defect", _QUICK)
def test_a_defect_is_found_by_its_kind_of_test(defect: str) -> None:
    kind = _FOUND_BY[defect]
    tests = broken(audited(defect, 2000, only=frozenset({"logprobs", kind})))
    assert any(test.startswith(kind) for test in tests), tests


def test_a_correct_server_raises_no_alarm() -> None:
    report = audited("", 2000)
    assert broken(report) == []
    assert {finding.verdict.value for finding in report.findings} == {"holds"}
    assert report.conclusion == "no defect found"


def test_the_law_alone_finds_a_sampler_that_commits_the_argmax() -> None:
    report = audited("argmax", 2000, only=frozenset({"law"}))
    first = next(finding for finding in report.findings if finding.test == "law: T = 1, reported law")
    assert first.verdict == "broken"
    assert first.figures["found_at"] < 200
    assert first.replays


def test_seeds_that_do_not_repeat_are_a_note() -> None:
    report = audited("seed_crowd", 500, only=frozenset({"fields"}))
    seeds = next(finding for finding in report.findings if finding.test == "fields: seed repeats")
    assert seeds.verdict == "note"
    assert broken(report) == []


@pytest.mark.storm
@pytest.mark.parametrize("defect", sorted(_FOUND_BY))
def test_every_defect_of_the_table_is_found(defect: str) -> None:
    assert defect in DEFECTS
    tests = broken(audited(defect, 4000))
    assert any(test.startswith(_FOUND_BY[defect]) for test in tests), tests


@pytest.mark.storm
@pytest.mark.parametrize("seed", range(6))
def test_correct_runs_raise_no_alarm(seed: int) -> None:
    assert broken(audited("", 4000, seed)) == []
