"""A drafter with a hybrid draft model dies in the middle of a stream, and another takes up sessions it never saw."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from e2e_exact import OFF
from e2e_incident import BODY, NUM_TOKENS, goes_on_elsewhere
from e2e_rest import complete, speculation
from e2e_stack import PATIENT, RunningStack, run_stack

from tests.drafting.agreeing_mtp import save_served_hybrid

pytestmark = [pytest.mark.storm, pytest.mark.timeout(900)]
DRAFTED = {**BODY, **speculation("draft_model", 3, annotate=True)}


@pytest.fixture(scope="module")
def draft_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The target drafts for itself."""
    folder = tmp_path_factory.mktemp("hybrid-draft-stack")
    target = save_served_hybrid(folder / "hybrid")
    with run_stack(
        folder / "run", dtype="float32", draft_model=target, gateway_args=PATIENT, is_paced=True, model=target
    ) as running:
        yield running


@pytest.fixture(scope="module")
async def http(draft_stack: RunningStack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=draft_stack.url, timeout=300) as client:
        yield client


async def test_a_drafter_that_dies_and_comes_back(draft_stack: RunningStack, http: httpx.AsyncClient) -> None:
    quiet = await complete(http, {**BODY, **OFF})
    _, again = await goes_on_elsewhere(draft_stack, http, "drafter-0", DRAFTED, quiet)
    rejected = again.speculation["num_draft_tokens"] - again.speculation["num_accepted_draft_tokens"]
    assert again.speculation["num_accepted_draft_tokens"] > NUM_TOKENS / 2
    assert 0 <= rejected <= 3, "what max_tokens cut off at the end"
