"""Cutting a release, on a copy of the files that it changes."""

from __future__ import annotations

import shutil
import tomllib
from datetime import date
from pathlib import Path

import pytest
import yaml

from deploy.packaging.cut_release import cut

ROOT = Path(__file__).parents[2]
CHART = "deploy/kubernetes/chart/Chart.yaml"
DAY = date(2026, 1, 2)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "CHANGELOG.md", CHART):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    text = (tmp_path / "CHANGELOG.md").read_text()
    (tmp_path / "CHANGELOG.md").write_text(text.replace("## [Unreleased]\n", "## [Unreleased]\n\n- A change.\n", 1))
    return tmp_path


def test_every_place_has_the_new_version(copy: Path) -> None:
    before = (copy / "CHANGELOG.md").read_text()
    cut(copy, "7.1.0", DAY)
    assert tomllib.loads((copy / "pyproject.toml").read_text())["project"]["version"] == "7.1.0"
    chart = yaml.safe_load((copy / CHART).read_text())
    assert (chart["version"], chart["appVersion"]) == ("7.1.0", "7.1.0")
    text = (copy / "CHANGELOG.md").read_text()
    assert "## [Unreleased]\n\n## [7.1.0] - 2026-01-02\n\n- A change.\n" in text
    assert text.replace("\n## [7.1.0] - 2026-01-02\n", "", 1) == before


@pytest.mark.parametrize(("version", "said"), [("0.0.1", "is not above"), ("seven", "Invalid version")])
def test_a_version_that_cannot_be(copy: Path, version: str, said: str) -> None:
    before = (copy / "CHANGELOG.md").read_bytes()
    with pytest.raises(SystemExit, match=said):
        cut(copy, version, DAY)
    assert (copy / "CHANGELOG.md").read_bytes() == before


def test_nothing_to_release(copy: Path) -> None:
    cut(copy, "7.1.0", DAY)
    with pytest.raises(SystemExit, match="nothing under"):
        cut(copy, "7.2.0", DAY)
