"""--speculative-config sets what a request without `speculation` gets."""

from __future__ import annotations

import httpx
import pytest
from e2e_exact import OFF, PROMPTS, check_figures, counters, request_body
from e2e_rest import complete
from e2e_stack import RunningStack

pytestmark = pytest.mark.storm


async def test_the_server_sets_the_default_method(float32_stack: RunningStack, float32_http: httpx.AsyncClient) -> None:
    """The float32 stack was started with --speculative-config: n-grams, four tokens."""
    before = counters(float32_stack, "ngram")
    answer = await complete(float32_http, request_body(PROMPTS[0], {"temperature": 0}))
    check_figures(answer, 4)
    assert answer.speculation["num_spec_steps"] > 0
    moved = [after - earlier for after, earlier in zip(counters(float32_stack, "ngram"), before, strict=True)]
    assert moved[0] == answer.speculation["num_spec_steps"]
    assert (await complete(float32_http, request_body(PROMPTS[0], OFF))).speculation["num_spec_steps"] == 0
