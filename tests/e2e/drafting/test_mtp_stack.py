"""A hybrid with an MTP layer behind a gateway, served with vLLM's config: same bytes, true figures, a death."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from e2e_exact import OFF, PROMPTS, SETTINGS, check_figures, request_body, same_bytes_alone_and_together
from e2e_incident import BODY, goes_on_elsewhere
from e2e_rest import complete, complete_all, speculation
from e2e_stack import PATIENT, RunningStack, run_stack

from tests.drafting.agreeing_mtp import save_served_hybrid

pytestmark = [pytest.mark.storm, pytest.mark.timeout(900)]
CONFIG = '{"method": "mtp", "num_speculative_tokens": 3}'
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "mtp 1": speculation("mtp", 1),
    "mtp tree": speculation("mtp", 5, token_tree=True),
    "ngram": speculation("ngram", 4),
    "auto": speculation("auto"),
}
NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string", "pattern": "^[a-z ]{200,240}$"}, "line": {"type": "integer"}},
    "required": ["text", "line"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": NOTE}} for name in ("note", "write")]
LAWS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.8, "seed": 4}}


@pytest.fixture(scope="module")
def mtp_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """No methods and no drafts are named: the config alone makes the verifier read the MTP layer."""
    folder = tmp_path_factory.mktemp("mtp-stack")
    target = save_served_hybrid(folder / "hybrid")
    with run_stack(
        folder / "run",
        dtype="float32",
        draft_model=None,
        methods=(),
        speculative_config=CONFIG,
        # Loading another verifier takes minutes on a busy machine.
        gateway_args=(*PATIENT, "--tool-call-parser", "hermes", "--failover-s", "400"),
        is_paced=True,
        num_drafters=0,
        model=target,
    ) as running:
        yield running


@pytest.fixture(scope="module")
async def http(mtp_stack: RunningStack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mtp_stack.url, timeout=300) as client:
        yield client


def mtp_drafts(stack: RunningStack) -> float:
    return stack.metric("outrider:spec_decode_num_drafts_total", method="mtp")


async def test_the_config_sets_the_default(mtp_stack: RunningStack, http: httpx.AsyncClient) -> None:
    before = mtp_drafts(mtp_stack)
    answer = await complete(http, request_body(PROMPTS[0], {"temperature": 0}))
    check_figures(answer, 3)
    assert mtp_drafts(mtp_stack) - before == answer.speculation["num_spec_steps"] > 0
    assert 0 < answer.speculation["num_accepted_draft_tokens"] < answer.speculation["num_draft_tokens"]
    (verifier,) = (await http.get("/fleet")).json()["verifiers"]
    assert "mtp" in {method["name"] for method in verifier["methods"]}


async def test_auto_knows_the_method(mtp_stack: RunningStack, http: httpx.AsyncClient) -> None:
    before = mtp_drafts(mtp_stack)
    await complete_all(http, [request_body(prompt, {"temperature": 0}, WAYS["auto"]) for prompt in PROMPTS])
    assert mtp_drafts(mtp_stack) > before


@pytest.mark.parametrize("setting", SETTINGS)
async def test_same_bytes_alone_and_together(http: httpx.AsyncClient, setting: str) -> None:
    for name, answer in (await same_bytes_alone_and_together(http, setting, WAYS)).items():
        assert answer.origins.count("accepted") == answer.speculation["num_accepted_draft_tokens"], name


@pytest.mark.parametrize("law", LAWS)
async def test_forced_tool_calls(http: httpx.AsyncClient, law: str) -> None:
    """Arguments of 200 characters and more, of a model whose every character the grammar chooses from."""
    calls, drafted = {}, {}
    for name, way in (("off", OFF), *WAYS.items()):
        body = {"messages": [{"role": "user", "content": PROMPTS[1]}], "tools": TOOLS, "tool_choice": "required"}
        fields = {"parallel_tool_calls": False, "max_tokens": 400, **LAWS[law], **way}
        reply = await http.post("/v1/chat/completions", json=body | fields)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        calls[name] = [call["function"] for call in choice["message"]["tool_calls"]]
        drafted[name] = reply.json()["metrics"]["speculative_decoding"]["num_draft_tokens"]
    (call,) = calls["off"]
    assert call["name"] in ("note", "write")
    assert len(json.loads(call["arguments"])["text"]) >= 200
    assert {name: found == calls["off"] for name, found in calls.items()} == dict.fromkeys(calls, True)
    assert drafted["off"] == 0
    assert min(drafted[name] for name in ("default", "mtp 1", "mtp tree", "ngram")) > 0


async def test_a_killed_verifier_goes_on_drafting_elsewhere(mtp_stack: RunningStack, http: httpx.AsyncClient) -> None:
    body = {**BODY, **speculation("mtp", 3, annotate=True)}
    quiet = await complete(http, {**BODY, **OFF})
    await goes_on_elsewhere(mtp_stack, http, "verifier", body, quiet)
