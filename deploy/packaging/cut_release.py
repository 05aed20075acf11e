"""Cuts a release: the version in pyproject.toml and the chart, and the changelog's "Unreleased" under its number.

    python deploy/packaging/cut_release.py 0.2.0        # `make release VERSION=0.2.0` does it, and builds

Not here: building (build_wheels.py), trying what was built (try_wheel.sh), commits and tags.
"""

from __future__ import annotations

import re
import sys
from datetime import UTC, date, datetime
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[2]
_UNRELEASED = "## [Unreleased]\n"
# Where the version stands, each with the pattern around it.
_PLACES = {
    "pyproject.toml": r'^(version = "){}(")$',
    "deploy/kubernetes/chart/Chart.yaml": r'^((?:version|appVersion): "?){}("?)$',
}


def cut(root: Path, version: str, today: date) -> list[str]:
    """Writes the files and returns their names. Raises SystemExit, with nothing written."""
    before = re.search(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if before is None:
        raise SystemExit("pyproject.toml has no version")
    try:
        is_later = Version(version) > Version(before[1])
    except InvalidVersion as error:
        raise SystemExit(str(error)) from None
    if not is_later:
        raise SystemExit(f"{version} is not above {before[1]}, the version in pyproject.toml")
    written = {"CHANGELOG.md": _changelog((root / "CHANGELOG.md").read_text(encoding="utf-8"), version, today)}
    for name, pattern in _PLACES.items():
        text, places = re.subn(
            pattern.format(re.escape(before[1])),
            rf"\g<1>{version}\g<2>",
            (root / name).read_text(encoding="utf-8"),
            flags=re.MULTILINE,
        )
        if not places:
            raise SystemExit(f"{name} does not name version {before[1]}")
        written[name] = text
    for name, text in written.items():
        (root / name).write_text(text, encoding="utf-8")
    return list(written)


def _changelog(text: str, version: str, today: date) -> str:
    above, heading, below = text.partition(_UNRELEASED)
    entries = below.partition("\n## [")[0]
    if not heading or not re.search(r"^- ", entries, re.MULTILINE):
        raise SystemExit("CHANGELOG.md has nothing under [Unreleased]")
    return f"{above}{_UNRELEASED}\n## [{version}] - {today.isoformat()}\n{below}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    changed = cut(ROOT, sys.argv[1], datetime.now(UTC).date())
    print(f"{', '.join(changed)} say {sys.argv[1]}; look at them, commit, and tag v{sys.argv[1]}")
