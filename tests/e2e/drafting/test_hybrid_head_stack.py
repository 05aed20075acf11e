"""The demo hybrid with its EAGLE-3 head behind a gateway, beside its own MTP layer: same bytes, whoever drafts, in the
verifier or in a drafter; and a verifier that dies in mid-stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from e2e_exact import OFF, PROMPTS, SETTINGS, request_body, same_bytes_alone_and_together
from e2e_incident import BODY, KILL_AFTER, NUM_TOKENS, goes_on_elsewhere
from e2e_rest import complete, complete_all, speculation
from e2e_stack import MODELS, PATIENT, RunningStack, run_stack

pytestmark = [pytest.mark.storm, pytest.mark.timeout(900)]
WAYS: dict[str, dict[str, Any]] = {
    "eagle3 3": speculation("eagle3", 3),
    "eagle3 1": speculation("eagle3", 1),
    "eagle3 tree": speculation("eagle3", 6, token_tree=True),
    "mtp": speculation("mtp", 3),
    "ngram": speculation("ngram", 4),
    "auto": speculation("auto"),
}


@pytest.fixture(scope="module", params=[0, 1], ids=["in the verifier", "in a drafter"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with run_stack(
        tmp_path_factory.mktemp("hybrid-head-stack"),
        dtype="float32",
        draft_model=MODELS / "demo-hybrid-eagle3",
        methods=("eagle3", "mtp", "ngram"),
        gateway_args=(*PATIENT, "--failover-s", "400"),
        is_paced=True,
        num_drafters=request.param,
        model=MODELS / "demo-hybrid",
    ) as running:
        yield running


@pytest.fixture(scope="module")
async def http(stack: RunningStack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=300) as client:
        yield client


def eagle3_drafts(stack: RunningStack) -> float:
    return stack.metric("outrider:spec_decode_num_drafts_total", method="eagle3")


@pytest.mark.parametrize("setting", SETTINGS)
async def test_same_bytes_alone_and_together(http: httpx.AsyncClient, setting: str) -> None:
    for name, answer in (await same_bytes_alone_and_together(http, setting, WAYS)).items():
        if name.startswith("eagle3"):
            assert answer.speculation["num_accepted_draft_tokens"] > 0, name


async def test_auto_knows_the_head(stack: RunningStack, http: httpx.AsyncClient) -> None:
    """Beside an MTP layer, which it begins with, it tries the head within these tokens or has done so before."""
    names = {method["name"] for method in await methods_of(http)}
    assert {"eagle3", "mtp", "ngram"} <= names
    body = request_body(PROMPTS[0], {"temperature": 0}, WAYS["auto"])
    answers = await complete_all(http, [{**body, "max_tokens": 1500}] * 2)
    assert answers[0].token_ids == answers[1].token_ids
    assert eagle3_drafts(stack) > 0


async def methods_of(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    fleet = (await http.get("/fleet")).json()
    return [method for kind in ("verifiers", "drafters") for member in fleet[kind] for method in member["methods"]]


async def test_a_killed_verifier_goes_on_drafting_elsewhere(stack: RunningStack, http: httpx.AsyncClient) -> None:
    """The next one computes the hidden states of what is committed: as many tokens are accepted after it as before."""
    body = {**BODY, "temperature": 0, **speculation("eagle3", 3, annotate=True)}
    quiet = await complete(http, {**body, **OFF})
    seen, again = await goes_on_elsewhere(stack, http, "verifier", body, quiet)
    undisturbed = again.origins[KILL_AFTER:].count("accepted")
    assert undisturbed > NUM_TOKENS / 4
    # The round of the kill, and those beside it, are without a draft.
    assert seen.origins[KILL_AFTER:].count("accepted") > 0.9 * undisturbed - 12
