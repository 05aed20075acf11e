"""`outrider audit` of this server, with each of its draft methods: what it tests in other engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_rest import speculation
from e2e_stack import DEMO_DRAFT, MODELS, run_stack

from outrider.client.audit.__main__ import main

pytestmark = [pytest.mark.storm, pytest.mark.timeout(600)]
HEADS = ("eagle3", "eagle", "medusa", "mlp_speculator", "dspark")
METHODS = ("draft_model", *HEADS, "ngram", "suffix")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    drafts = ",".join(
        str(path) for path in (DEMO_DRAFT, *(MODELS / f"demo-{head.replace('_', '-')}" for head in HEADS))
    )
    folder = tmp_path_factory.mktemp("audited")
    with run_stack(folder, dtype="auto", draft_model=drafts, methods=METHODS, num_drafters=0) as running:
        yield running.url


@pytest.mark.parametrize("method", METHODS)
def test_an_audit_finds_no_defect(url: str, method: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    bodies = ("--body", json.dumps(speculation(method, 4)), "--reference-body", json.dumps(speculation("off")))
    status = main([url, "--tests", "greedy,law", "--budget", "150", "--timeout", "300", "--json", str(report), *bodies])
    found = json.loads(report.read_text())
    assert status == 0, [finding for finding in found["findings"] if finding["verdict"] == "broken"]
    assert found["abilities"]["drafts_seen"]
