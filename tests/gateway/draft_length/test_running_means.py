"""Means that follow, by their definition."""

from __future__ import annotations

from outrider.gateway.draft_length.running_means import blend


def test_blending() -> None:
    assert blend(None, 3.0, 0.1) == 3.0
    assert blend(2.0, 3.0, 0.25) == 2.25
    assert blend(0.0, 1.0, 0.5) == 0.5
