"""A pytest plugin that prints a failure when it happens: a run that is cut off has named what it found."""

from __future__ import annotations

import os
import sys

import pytest

# characters of a failure's text, its end
_MOST_TEXT = 2500


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext[-_MOST_TEXT:]}", file=sys.stderr, flush=True)
