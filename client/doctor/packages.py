"""Checks Python and the installed packages against the version bounds of the installed distribution."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from outrider.client.doctor.check import Check

# Extras needed to serve; packages of other extras are checked where installed.
_NEEDED_EXTRAS = frozenset({"", "gateway", "engine"})
_DISTRIBUTION = "outrider"


def check_packages() -> Iterator[Check]:
    try:
        distribution = metadata.distribution(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        advice = "pip install 'outrider[server]'; the doctor is not for the client alone"
        yield Check("packages", "fail", f"{_DISTRIBUTION} itself is not installed", advice)
        return
    yield _python(distribution.metadata["Requires-Python"] or "")
    extras = ["", *(distribution.metadata.get_all("Provides-Extra") or [])]
    problems = list(_problems([Requirement(text) for text in distribution.requires or []], extras))
    yield from problems
    if not problems:
        found = f"outrider {distribution.version}, torch {metadata.version('torch')} and the others within bounds"
        yield Check("packages", "ok", found)


def _python(bounds: str) -> Check:
    found = platform.python_version()
    if SpecifierSet(bounds).contains(found, prereleases=True):
        return Check("python", "ok", found)
    return Check("python", "fail", f"{found}, not {bounds}", "recreate the environment with a Python in this range")


def _problems(requirements: list[Requirement], extras: list[str]) -> Iterator[Check]:
    """Yields one check per package with a problem."""
    reported: set[str] = {_DISTRIBUTION}
    for requirement in requirements:
        marker = requirement.marker
        wanted_by = [extra for extra in extras if marker is None or marker.evaluate({"extra": extra})]
        if requirement.name in reported or not wanted_by:
            continue
        is_needed = not _NEEDED_EXTRAS.isdisjoint(wanted_by)
        check = _package(requirement, is_needed)
        if check is not None:
            reported.add(requirement.name)
            yield check


def _package(requirement: Requirement, is_needed: bool) -> Check | None:
    """Checks one package; None: it is fine, or neither installed nor needed."""
    name = f"package {requirement.name}"
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Check(name, "fail", "not installed", "pip install 'outrider[server]'") if is_needed else None
    if requirement.specifier.contains(found, prereleases=True):
        return None
    advice = f"pip install '{requirement.name}{requirement.specifier}'"
    return Check(name, "fail" if is_needed else "warn", f"{found}, not {requirement.specifier}", advice)
