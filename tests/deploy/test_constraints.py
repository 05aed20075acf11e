"""deploy/constraints.txt: a version for every requirement, and no install that goes without it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))
# Pinned where it is installed: it comes in several builds.
ELSEWHERE = {"torch", "outrider"}


@pytest.fixture(scope="module")
def pins() -> dict[str, Version]:
    lines = (ROOT / "deploy/constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def requirements() -> list[Requirement]:
    """Of the project, of all its extras and of its build."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = settings["project"]["optional-dependencies"].values()
    lists = [settings["project"]["dependencies"], settings["build-system"]["requires"], *extras]
    found = [Requirement(text) for texts in lists for text in texts]
    return [requirement for requirement in found if requirement.name not in ELSEWHERE]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_requirement_has_a_version_that_satisfies_it(requirement: Requirement, pins: dict[str, Version]) -> None:
    assert pins[canonicalize_name(requirement.name)] in requirement.specifier


def test_generated_code_is_not_newer_than_the_runtime(pins: dict[str, Version]) -> None:
    assert pins["grpcio-tools"] <= pins["grpcio"]
    assert not ELSEWHERE & pins.keys()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_images_install_these_versions_and_no_other(path: Path) -> None:
    before, set_here, after = path.read_text().partition("ENV PIP_CONSTRAINT=/src/deploy/constraints.txt ")
    assert set_here
    assert "COPY deploy/constraints.txt deploy/\n" in before
    assert not re.search(r"(\$PIP|bin/pip) install", before)
    # A version of its own, perhaps one that the package index does not have.
    assert not re.search(r"==(?!\d)", after)
    assert re.search(r"^ARG PYTHON_IMAGE=python:\d+\.\d+\.\d+-slim-\w+$", before, re.MULTILINE)


@pytest.mark.parametrize("name", ["Makefile", "deploy/packaging/try_wheel.sh"])
def test_environments_are_made_with_them(name: str) -> None:
    commands = (ROOT / name).read_text().replace("\\\n", " ").splitlines()
    # With hashes, and without what it needs, one file is installed and no version is chosen.
    installs = [line for line in commands if re.search(r"/pip install", line) and "--require-hashes" not in line]
    assert installs
    assert all("-c $(CONSTRAINTS)" in line or '-c "$root/deploy/constraints.txt"' in line for line in installs)
