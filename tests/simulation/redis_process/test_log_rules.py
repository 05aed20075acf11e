"""The rules that each script keeps: with the real scripts none is broken, with a planted bug one is."""

from __future__ import annotations

import random

import pytest

from outrider.shared.log import commit_scripts
from tests.simulation.mutants import MUTANTS
from tests.simulation.redis_process.test_redis_node import drawn_commands, make_node


def broken_rules() -> list[str]:
    """Runs drawn calls of the scripts as they are now; returns the rules that they broke."""
    told: list[str] = []
    node = make_node(told.append)
    shas = [node.execute(("SCRIPT", "LOAD", script)).decode() for script in commit_scripts.ALL]
    for seed in range(4):
        for command in drawn_commands(random.Random(seed), shas):
            node.execute(command)
    return [rule for rule in told if "two connections" not in rule]  # the drawn epochs are terms


def test_the_scripts_keep_the_rules() -> None:
    assert broken_rules() == []


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("append without a look at the fence", "superseded has written"),
        ("a repeated append is appended again", "has changed what was there"),
        ("a restore without a look at the fence", "superseded has written"),
        ("a late restore removes what was appended since", "has removed what its sender"),
        ("an append behind another gateway's tokens", "may not have"),
    ],
)
def test_a_planted_bug_breaks_one(name: str, rule: str) -> None:
    with MUTANTS[name]():
        assert any(rule in broken for broken in broken_rules())


def test_an_epoch_is_one_connection_s_whatever_the_term() -> None:
    told: list[str] = []
    node = make_node(told.append)
    append = node.execute(("SCRIPT", "LOAD", commit_scripts.APPEND)).decode()
    claim = node.execute(("SCRIPT", "LOAD", commit_scripts.CLAIM)).decode()
    keys = ("r:0:log", "r:0:fence", "r:record")
    node.execute(("SET", keys[2], b"record", "EX", 600))

    def appended(term: int, holder: str, base_len: int, epoch: int) -> None:
        entry = (base_len, 1, bytes(4), 0, epoch, b"")
        assert (
            node.execute(("EVALSHA", append, 3, *keys, term, holder, 600, *entry, b"record")) == commit_scripts.APPENDED
        )

    appended(0, "a", 0, 77)
    appended(0, "a", 1, 77)
    assert node.execute(("EVALSHA", claim, 2, keys[2], keys[1], "b", 600, b"record")) == [1]
    appended(1, "b", 2, 99 + (1 << 20))
    assert told == []
    appended(1, "b", 3, 77 + (1 << 20))
    assert len(told) == 1
