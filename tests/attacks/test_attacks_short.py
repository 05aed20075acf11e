"""No attack refuses or changes a neighbour's stream, or takes the gateway's memory.

Not here: how much slower the neighbours are, which other tests on the machine would decide; `python -m tests.attacks`.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.attacks.attacks import ATTACKS
from tests.attacks.holding import HOLDS, run_holds
from tests.attacks.run import run_attacks
from tests.attacks.stack import running_stack

pytestmark = [pytest.mark.storm, pytest.mark.timeout(900)]
# bytes; of the gateway, at any time; less than what Compose gives it (docker-compose.yml, GATEWAY_MEMORY)
MAX_GATEWAY_BYTES = 1500 * 2**20


async def test_neighbours_are_served_as_if_alone(tmp_path: Path) -> None:
    with running_stack(tmp_path) as stack:
        outcomes = await run_attacks(stack, print)
    assert [outcome.name for outcome in outcomes] == list(ATTACKS)
    assert [outcome for outcome in outcomes if outcome.has_hurt] == []
    assert [outcome for outcome in outcomes if not outcome.attackers[httpx.codes.OK]] == [], "they attack nothing"
    assert max(outcome.gateway_peak_bytes for outcome in outcomes) < MAX_GATEWAY_BYTES


async def test_places_held_by_one_caller_are_not_the_neighbours(tmp_path: Path) -> None:
    with running_stack(tmp_path, num_drafters=1) as stack:
        outcomes = await run_holds(stack, print)
    assert [outcome.name for outcome in outcomes] == list(HOLDS)
    assert [outcome for outcome in outcomes if outcome.refused] == []
    [verified] = [outcome.attackers for outcome in outcomes if "receipts" in outcome.name]
    assert verified["confirmed"] > 0
    assert not verified["200"], "an answer of this fleet is not confirmed by it"
    [background] = [outcome.attackers for outcome in outcomes if "background" in outcome.name]
    assert background["cancelled 200"] == background["begun 200"] > 0
