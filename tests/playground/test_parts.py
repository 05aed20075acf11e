"""Reasoning and tool calls on the page: told apart by name, without markers, each token with its origin as before."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from browsing import Screen, Viewer
from playwright.async_api import expect

from tests.e2e.e2e_stack import DEMO_DRAFT, PATIENT, RunningStack, run_stack

pytestmark = pytest.mark.storm


@pytest.fixture(scope="module")
def tool_stack(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The demo model writes no calls of its own accord, so the requests force one."""
    args = (*PATIENT, "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    run_dir = tmp_path_factory.mktemp("tools")
    with run_stack(run_dir, dtype="auto", draft_model=DEMO_DRAFT, gateway_args=args) as running:
        yield running


@pytest.fixture
async def chat(viewer: Viewer, tool_stack: RunningStack) -> Screen:
    screen = await viewer.open(tool_stack.url, kind="Chat")
    await screen.settings(Method="draft_model", Draft_length="4")
    return screen


async def test_a_call_is_shown_as_a_call(chat: Screen) -> None:
    page = chat.page
    await page.get_by_role("button", name="gravity").click()
    await page.get_by_text("System message and tools").click()
    await page.get_by_role("button", name="An example").click()
    await page.get_by_label("The model must call one").check()
    await page.get_by_role("button", name="Send").click()
    await chat.until_done()
    call = chat.panel().get_by_role("list", name="Tool calls").locator("li").first
    assert await call.locator("b").inner_text() == "get_weather"
    assert json.loads(await call.locator("code").inner_text())["unit"] in ("celsius", "fahrenheit")
    await expect(chat.panel().locator(".state")).to_have_text("Done: the model calls tools.")
    labels = await chat.panel().locator(".part").all_inner_texts()
    assert labels[:1] == ["Tool call"]
    # Markers take no room as text, and every token is still there with its origin.
    tokens = await chat.tokens()
    assert "".join(token.text for token in tokens).startswith("<tool_call>")
    assert {token.origin for token in tokens} > {"accepted"}
    assert "<tool_call>" not in await chat.panel().locator(".text").evaluate(
        """text => [...text.querySelectorAll(".token")].filter(one => getComputedStyle(one).fontSize !== "0px")
           .map(one => one.textContent).join("")"""
    )
    await chat.check_accessible()
    await chat.picture("tool-call")


async def test_tools_that_are_no_json_are_not_sent(chat: Screen) -> None:
    await chat.page.get_by_role("button", name="gravity").click()
    await chat.page.get_by_text("System message and tools").click()
    await chat.page.get_by_label("Tools", exact=True).fill('[{"type":')
    await expect(chat.page.get_by_role("alert")).to_have_text("The tools are not JSON.")
    await expect(chat.page.get_by_role("button", name="Send")).to_be_disabled()
