"""The switch: drafts are asked for where they bring tokens faster, by what is measured."""

from __future__ import annotations

import random

from outrider.plugins.switch import Switch


def run(switch: Switch, num_steps: int, seconds_with: float, tokens_with: float, num_rows: int = 4) -> float:
    """Steps of 10 ms and a token a row without drafts; returns the share of steps with drafts."""
    num_with, owed = 0, 0.0
    for _ in range(num_steps):
        drafts = switch.wants(num_rows)
        num_with += drafts
        owed += num_rows * (tokens_with if drafts else 1.0)
        switch.observe(num_rows, int(owed), seconds_with if drafts else 0.010)
        owed -= int(owed)
    return num_with / num_steps


def test_drafts_that_pay_stay_on() -> None:
    assert run(Switch(), 6_000, 0.015, 2.5) > 0.9


def test_drafts_that_lose_go_off_and_are_seldom_tried() -> None:
    switch = Switch()
    assert run(switch, 6_000, 0.015, 1.0) < 0.1
    assert not switch.wants(4)


def test_what_changes_is_noticed() -> None:
    switch = Switch()
    run(switch, 500, 0.015, 1.0)
    assert run(switch, 2_000, 0.015, 3.0) > 0.5
    assert run(switch, 4_000, 0.015, 1.1) < 0.5


def test_what_slows_the_machine_down_now_and_then_is_no_reason() -> None:
    """Time doubles for whole trials and for parts of them; drafts bring a tenth less, or more, all the same."""
    for tokens_with, share in ((1.35, 0.15), (1.65, 0.85)):
        switch, num_with, owed, noise = Switch(), 0, 0.0, random.Random(1)
        slow = 1.0
        for step in range(8_000):
            if step % 40 == 0:
                slow = noise.choice([1.0, 1.2, 2.0])
            drafts = switch.wants(4)
            num_with += drafts
            owed += 4 * (tokens_with if drafts else 1.0)
            switch.observe(4, int(owed), slow * (0.015 if drafts else 0.010))
            owed -= int(owed)
        assert (num_with / 8_000 < share) if tokens_with < 1.5 else (num_with / 8_000 > share)


def test_sizes_are_apart() -> None:
    switch = Switch()
    run(switch, 2_000, 0.015, 1.0, num_rows=16)
    assert not switch.wants(16)
    assert switch.wants(2)
