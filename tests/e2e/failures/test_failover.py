"""Services die or hang in the middle of a stream; the stream goes on, and its tokens are those of a quiet run.

The target drafts for itself here, so that drafts are accepted at the moment of the kill whatever the weights are.
"""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest
from e2e_incident import BODY, interrupted
from e2e_rest import Answer, complete, speculation
from e2e_stack import RunningStack

pytestmark = pytest.mark.storm

# A machine that stands still for a moment makes a gap too; a drafter that hangs is lost after 15 s at the earliest.
LONGEST_GAP_S = 10.0
# One that is held up before it hangs has cost another timeout by then.
MOST_TIMEOUTS = 5


@pytest.fixture(scope="module")
async def quiet(mortal_http: httpx.AsyncClient) -> Answer:
    """The same request without an incident and without drafts."""
    return await complete(mortal_http, {**BODY, **speculation("off")})


@pytest.fixture(autouse=True)
async def whole_fleet(mortal_stack: RunningStack, quiet: Answer) -> None:
    mortal_stack.revive()
    await asyncio.to_thread(mortal_stack.wait_fleet)


async def test_every_draft_of_the_target_itself_is_accepted(mortal_http: httpx.AsyncClient, quiet: Answer) -> None:
    answer = await complete(mortal_http, BODY)
    assert answer.token_ids == quiet.token_ids
    # All, to the bit, though the drafter computed them in other batches; but for what max_tokens cut off at the end.
    rejected = answer.speculation["num_draft_tokens"] - answer.speculation["num_accepted_draft_tokens"]
    assert 0 <= rejected <= 2
    assert "corrected" not in answer.origins


async def test_a_drafter_that_hangs(mortal_stack: RunningStack, mortal_http: httpx.AsyncClient, quiet: Answer) -> None:
    timeouts = mortal_stack.metric("outrider:draft_timeouts_total")
    try:
        seen = await interrupted(mortal_http, lambda: mortal_stack.signal("drafter-0", signal.SIGSTOP))
    finally:
        mortal_stack.signal("drafter-0", signal.SIGCONT)
    assert tuple(seen.token_ids) == quiet.token_ids
    assert seen.text == quiet.text
    # One draft timeout (0.5 s by default) and a round; never one timeout per token, which would be minutes.
    assert 1 <= mortal_stack.metric("outrider:draft_timeouts_total") - timeouts <= MOST_TIMEOUTS
    assert seen.longest_gap_s < LONGEST_GAP_S


async def test_a_verifier_that_dies_and_comes_back(
    mortal_stack: RunningStack, mortal_http: httpx.AsyncClient, quiet: Answer
) -> None:
    failovers = mortal_stack.metric("outrider:verifier_failovers_total")

    def restart() -> None:
        mortal_stack.kill("verifier")
        mortal_stack.revive()

    seen = await interrupted(mortal_http, restart)
    assert tuple(seen.token_ids) == quiet.token_ids
    assert seen.text == quiet.text
    assert mortal_stack.metric("outrider:verifier_failovers_total") > failovers


async def test_a_drafter_that_dies(mortal_stack: RunningStack, mortal_http: httpx.AsyncClient, quiet: Answer) -> None:
    lost = mortal_stack.metric("outrider:drafters_lost_total")
    seen = await interrupted(mortal_http, lambda: mortal_stack.kill("drafter-0"))
    assert tuple(seen.token_ids) == quiet.token_ids
    assert seen.text == quiet.text
    assert seen.origins[-1] == "target"
    # Until the gateway's next look at its fleet a session may find the dead drafter again.
    assert mortal_stack.metric("outrider:drafters_lost_total") >= lost + 1
