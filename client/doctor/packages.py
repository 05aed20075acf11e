"""Python and the installed packages, against the bounds that the installed distribution names."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from client.doctor.check import Check

# Without these nothing is served; what other extras name is checked where it is installed.
_NEEDED_EXTRAS = frozenset({"", "gateway", "engine"})
_DISTRIBUTION = "outrider"


def check_packages() -> Iterator[Check]:
    try:
        distribution = metadata.distribution(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        advice = "pip install 'outrider[server]'; the client alone needs no doctor"
        yield Check("packages", "fail", f"{_DISTRIBUTION} itself is not installed", advice)
        return
    yield _python(distribution.metadata["Requires-Python"] or "")
    extras = ["", *(distribution.metadata.get_all("Provides-Extra") or [])]
    problems = list(_problems([Requirement(text) for text in distribution.requires or []], extras))
    yield from problems
    if not problems:
        found = f"outrider {distribution.version}, torch {metadata.version('torch')} and the others within their bounds"
        yield Check("packages", "ok", found)


def _python(bounds: str) -> Check:
    found = platform.python_version()
    if SpecifierSet(bounds).contains(found, prereleases=True):
        return Check("python", "ok", found)
    return Check("python", "fail", f"{found}, not {bounds}", "make the environment anew with a Python in these bounds")


def _problems(requirements: list[Requirement], extras: list[str]) -> Iterator[Check]:
    """One per package."""
    told: set[str] = {_DISTRIBUTION}
    for requirement in requirements:
        marker = requirement.marker
        wanted_by = [extra for extra in extras if marker is None or marker.evaluate({"extra": extra})]
        if requirement.name in told or not wanted_by:
            continue
        is_needed = not _NEEDED_EXTRAS.isdisjoint(wanted_by)
        check = _package(requirement, is_needed)
        if check is not None:
            told.add(requirement.name)
            yield check


def _package(requirement: Requirement, is_needed: bool) -> Check | None:
    """None where it is as it should be, or not there and not needed."""
    name = f"package {requirement.name}"
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Check(name, "fail", "not installed", "pip install 'outrider[server]'") if is_needed else None
    if requirement.specifier.contains(found, prereleases=True):
        return None
    advice = f"pip install '{requirement.name}{requirement.specifier}'"
    return Check(name, "fail" if is_needed else "warn", f"{found}, not {requirement.specifier}", advice)
