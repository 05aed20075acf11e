"""Values per verifier: each its own, kept while the verifier is in the fleet."""

from __future__ import annotations

from outrider.gateway.draft_length.by_verifier import ByVerifier


def test_each_verifier_has_its_own_and_those_that_left_are_dropped() -> None:
    present = ["a:1", "b:1"]
    values = ByVerifier(list[int], lambda: present)
    values.of("a:1").append(1)
    assert (values.of("a:1"), values.of("b:1")) == ([1], [])
    present[:] = ["a:1", "c:1"]
    values.of("b:1").append(2)
    assert values.of("b:1") == [2], "a session may still be there"
    assert values.of("c:1") == []
    assert (values.of("a:1"), values.of("b:1")) == ([1], [])
