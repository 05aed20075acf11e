"""Prometheus' text format, read as far as counters need it; without a package, for the client's wheel has none."""

from __future__ import annotations

import re
from collections import defaultdict

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", re.MULTILINE)


def sums(text: str) -> dict[str, float]:
    """Every sample's name with the sum over its labels. What is no sample counts for nothing: a server may answer
    /metrics with a page of its own."""
    found: dict[str, float] = defaultdict(float)
    for name, text_of_value in _SAMPLE.findall(text):
        try:
            value = float(text_of_value)
        except ValueError:
            continue
        found[name] += value
    return dict(found)
