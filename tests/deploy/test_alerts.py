"""The alert rules: what they ask for is exported, and promtool raises each where it should and nowhere else."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.test_dashboard import METRIC, SCRAPE_LABELS, exported

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/alerts.yml"


def rules() -> list[dict[str, str]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_what_a_rule_asks_for_is_exported(rule: dict[str, str]) -> None:
    expression, series = rule["expr"], exported()
    assert METRIC.findall(expression) or expression.startswith("up{")
    assert len(METRIC.findall(expression)) == expression.count("outrider:"), "every metric names its job"
    by = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
    for name, job in METRIC.findall(expression):
        assert by - SCRAPE_LABELS <= series[job][name]


def test_promtool_raises_each_alert_and_no_other() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool on PATH: Debian has it in the package prometheus")
    command = ["promtool", "test", "rules", str(ROOT / "tests/deploy/alerts_test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_both_of_its_tests() -> None:
    tried = yaml.safe_load((ROOT / "tests/deploy/alerts_test.yml").read_text())["tests"]
    names = {rule["alert"] for rule in rules()}
    for raised in (False, True):
        assert names == {
            one["alertname"] for test in tried for one in test["alert_rule_test"] if bool(one["exp_alerts"]) == raised
        }
