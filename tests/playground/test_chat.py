"""The page as a chat: what it opens with, how an answer is shown, and what can be done with it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from browsing import PHONE, Screen, Viewer
from playwright.async_api import expect

from outrider.gateway.config import GatewayConfig
from outrider.gateway.request.tokenizer import Tokenizer
from tests.gateway.gateway_script import DEMO_TARGET, Script, ScriptedService
from tests.gateway.gateway_servers import open_servers

pytestmark = pytest.mark.storm

HOSTILE = """**Bold**, `code` and a list:

- one <img src=x onerror="alert(1)">
- [two](javascript:alert(2)) and [three](https://example.com)

<script>alert(3)</script><style>body { display: none }</style>"""


@asynccontextmanager
async def chat(viewer: Viewer, script: Script, **options: Any) -> AsyncIterator[tuple[Screen, ScriptedService]]:
    """A chat with a model that says what the script says."""
    service = ScriptedService(Tokenizer.load(DEMO_TARGET), script)
    async with open_servers(service, GatewayConfig(port=0, grpc_port=0)) as servers:
        try:
            yield await viewer.open(servers.url, kind="Chat", **options), service
        finally:
            await viewer.close()  # before the server, or the page would complain of it


async def test_it_opens_in_a_chat_that_drafts_as_it_pays(viewer: Viewer) -> None:
    async with chat(viewer, Script()) as (screen, service):
        page = screen.page
        await expect(page.get_by_text("Ask something")).to_be_visible()
        await expect(page.locator(".charts")).to_have_count(0)
        await screen.send("Hello?")
        await screen.until_done()
        [request] = service.requests
        assert request.speculation.method == "auto"
        assert request.sampling_params.max_tokens > 160
        await expect(page.locator(".charts")).to_have_count(1)
        await screen.check_accessible()


async def test_markdown_is_rendered_and_nothing_of_it_runs(viewer: Viewer) -> None:
    async with chat(viewer, Script(HOSTILE, 9)) as (screen, _service):
        await screen.send("Attack.")
        await screen.until_done()
        answer = screen.panel().locator(".markdown")
        assert await answer.locator("strong").all_inner_texts() == ["Bold"]
        assert await answer.locator("li").count() == 2
        assert await answer.locator("img, script, style, [onerror]").count() == 0
        assert '<img src=x onerror="alert(1)">' in await answer.inner_text()
        links = await answer.locator("a").evaluate_all(
            "links => links.map(link => [link.getAttribute('href'), link.rel])"
        )
        assert links == [[None, "noopener noreferrer"], ["https://example.com", "noopener noreferrer"]]
        assert await screen.num_tokens() == 0
        await screen.page.get_by_role("switch", name="Mark accepted tokens").check()
        assert await screen.text() == HOSTILE


@pytest.mark.parametrize("size", [PHONE, (1280, 900)])
async def test_the_newest_answer_and_the_composer_are_in_sight(viewer: Viewer, size: tuple[int, int]) -> None:
    lines = "\n\n".join(f"Line {number} of a long answer." for number in range(40))
    async with chat(viewer, Script(lines, 9), size=size) as (screen, _service):
        await screen.send("Write much.")
        await screen.until_done()
        for last in (screen.page.get_by_text("Line 39"), screen.page.get_by_label("Message", exact=True)):
            box = await last.bounding_box()
            assert box is not None
            assert 0 < box["y"]
            assert box["y"] + box["height"] <= size[1]
        assert await screen.page.evaluate("document.documentElement.scrollWidth") <= size[0]
        await screen.check_accessible()


async def test_another_answer_an_edit_and_a_stop(viewer: Viewer) -> None:
    async with chat(viewer, Script()) as (screen, service):
        page = screen.page
        await screen.send("First?")
        await screen.until_done()
        await page.get_by_role("button", name="Regenerate").click()
        await expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
        one, other = service.requests
        assert (one.prompt_token_ids, one.sampling_params.seed) == (other.prompt_token_ids, 2)
        assert other.sampling_params.seed != 2
        await page.get_by_role("button", name="Edit").click()
        await expect(page.get_by_label("Message", exact=True)).to_have_value("First?")
        await expect(page.locator(".turn")).to_have_count(0)
        service.script.endless, service.script.delay_s = True, 0.02
        await page.get_by_label("Message", exact=True).press("Enter")
        await page.get_by_role("button", name="Stop").click()
        await expect(screen.panel().locator(".state")).to_have_text("Stopped.")
        await expect(page.get_by_role("button", name="Send")).to_be_visible()


@pytest.mark.parametrize(
    ("saved_us", "words"),
    [
        (124_500, "; speculation saved about 120 ms"),
        (2_340_000, "; speculation saved about 2.3 s"),
        (900, "; speculation saved nothing here"),
        (-987_000, "; speculation cost about 990 ms"),
    ],
)
async def test_an_answer_says_what_speculation_saved(viewer: Viewer, saved_us: int, words: str) -> None:
    script = Script(delay_s=0.01, saved_us=saved_us)
    async with chat(viewer, script) as (screen, _service):
        await screen.send("How fast?")
        await screen.until_done()
        await expect(screen.panel().locator(".figures")).to_have_text(re.compile(f"per second{words}$"))
        await screen.settings(Method="off")
        await screen.send("And without?")
        await screen.until_done()
        await expect(screen.panel().locator(".figures")).not_to_contain_text("speculation")


async def test_an_answer_is_copied(viewer: Viewer) -> None:
    async with chat(viewer, Script("Copy *me*.")) as (screen, _service):
        await screen.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await screen.send("Hello?")
        await screen.until_done()
        await screen.page.get_by_role("button", name="Copy").click()
        await screen.page.get_by_role("button", name="Copied").wait_for()
        assert await screen.page.evaluate("navigator.clipboard.readText()") == "Copy *me*."


async def test_earlier_chats_are_kept_in_the_browser(viewer: Viewer) -> None:
    async with chat(viewer, Script("An answer.")) as (screen, service):
        page = screen.page
        await screen.send("What was it?")
        await screen.until_done()
        await page.reload()
        await page.get_by_text("Ask something").wait_for()
        await page.get_by_label("Earlier chats").select_option(label="What was it?")
        await expect(page.locator(".turn.assistant .markdown")).to_have_text("An answer.")
        await screen.send("And now?")
        await screen.until_done()
        assert "What was it?" in service.tokenizer.decode(service.requests[-1].prompt_token_ids)
        await page.get_by_label("Earlier chats").select_option("forget")
        await expect(page.get_by_label("Earlier chats")).to_have_count(0)
        assert await page.evaluate("localStorage.getItem('outrider.chats')") is None


async def test_a_model_that_is_away_is_waited_for(viewer: Viewer) -> None:
    """The gateway says when to ask again; the page counts down and asks."""
    async with chat(viewer, Script("Back.")) as (screen, service):
        refusal = {"error": {"message": "no verifier", "type": "unavailable", "param": None, "code": 503}}
        headers = {"retry-after": "2"}
        refuse = lambda route: route.fulfill(status=503, json=refusal, headers=headers)  # noqa: E731
        await screen.page.route("**/v1/chat/completions", refuse, times=1)
        await screen.send("Are you there?")
        await expect(screen.panel().locator(".state")).to_contain_text("Asking again in 2 s")
        await expect(screen.panel().locator(".state")).to_contain_text("Asking again in 1 s")
        await screen.until_done()
        assert len(service.requests) == 1


async def test_panes_of_a_comparison_scroll_together(viewer: Viewer) -> None:
    async with chat(viewer, Script("\n".join(map(str, range(90))), 9)) as (screen, _service):
        for name in ("Mark accepted tokens", "Compare with speculation off"):
            await screen.page.get_by_role("switch", name=name).check()
        await screen.send("Count.")
        await expect(screen.page.locator(".verdict")).to_contain_text("Identical.")
        await screen.panel("Speculation on").locator(".text").evaluate("pane => pane.scrollTop = 300")
        other = screen.panel("Speculation off").locator(".text")
        await expect(other).to_have_js_property("scrollTop", 300)


async def test_the_documentation_of_the_api(viewer: Viewer) -> None:
    """Drawn with what this gateway serves; the viewer fails the test for a request to any other host."""
    async with chat(viewer, Script()) as (screen, _service):
        await screen.page.get_by_role("link", name="API documentation").click()
        await screen.page.get_by_text("/v1/chat/completions", exact=True).first.wait_for()


async def test_small_things(viewer: Viewer) -> None:
    """One token is not "1 tokens"; the example of tools is there only where calls are read."""
    async with chat(viewer, Script("Paris", 1)) as (screen, service):
        await screen.send("Capital?")
        await screen.until_done()
        num = len(service.tokenizer.encode("Paris", add_special_tokens=False))
        await expect(screen.panel().locator(".figures")).to_contain_text("1 token" if num == 1 else f"{num} tokens")
        await screen.page.get_by_text("System message and tools").click()
        await expect(screen.page.get_by_text("No parser reads this model's tool calls.")).to_be_visible()
        await expect(screen.page.get_by_role("button", name="An example")).to_have_count(0)
