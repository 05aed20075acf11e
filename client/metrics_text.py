"""Reads counters from Prometheus' text format, without a dependency: the client's wheel has no parser."""

from __future__ import annotations

import re
from collections import defaultdict

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", re.MULTILINE)


def sums(text: str) -> dict[str, float]:
    """Each sample's name with its sum over all labels. Skips lines that are not samples, e.g. an HTML page."""
    found: dict[str, float] = defaultdict(float)
    for name, text_of_value in _SAMPLE.findall(text):
        try:
            value = float(text_of_value)
        except ValueError:
            continue
        found[name] += value
    return dict(found)
