"""What the page shows when something is wrong: a dead drafter, a refusal, an error in mid-stream, a missing key."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from browsing import Screen, Viewer, until
from playwright.async_api import expect

from outrider.gateway.config import GatewayConfig
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.errors import VerifierLost
from tests.e2e.e2e_stack import RunningStack
from tests.gateway.gateway_script import DEMO_TARGET, Script, ScriptedService
from tests.gateway.gateway_servers import ALICE, key_file, open_servers

pytestmark = pytest.mark.storm

# A drafter loads its model: 8 s on two idle cores and a minute on busy ones.
LOADING_MS = 150_000.0
# The panel has more tokens than that, the last ten of them the target's, and goes on.
_GOES_ON_ALONE = """([title, num_tokens]) => {
  const panel = document.querySelector(`article[aria-label="${title}"]`);
  const tokens = [...panel.querySelectorAll("[data-token]")];
  return panel.getAttribute("aria-busy") === "true" && tokens.length > num_tokens
    && tokens.slice(-10).every(token => token.classList[1] === "target"); }"""


@pytest.fixture
def service() -> ScriptedService:
    """Tokens from a script, behind the real server."""
    return ScriptedService(Tokenizer.load(DEMO_TARGET), Script(delay_s=0.05))


@asynccontextmanager
async def served(viewer: Viewer, service: ScriptedService, config: GatewayConfig | None = None) -> AsyncIterator[str]:
    """Its address; pages are closed before the server is, or they would complain of it."""
    async with open_servers(service, config or GatewayConfig(port=0, grpc_port=0)) as servers:
        yield servers.url
        await viewer.close()


async def test_a_drafter_dies_in_mid_stream(screen: Screen, stack: RunningStack) -> None:
    """It is shown as gone, in the text and in the fleet, while the text goes on; then it is back."""
    page = screen.page
    await screen.settings(Method="draft_model", Draft_length="2", Temperature="0", Max_tokens="1900")
    await screen.page.get_by_role("switch", name="Compare").check()
    await screen.page.get_by_label("Compare both at once").check()
    await screen.run()
    panel = "Speculation on"
    await until(screen, 60, panel)
    await expect(page.locator(".fleet .drafters .state-word")).to_have_text("drafting")
    stack.kill("drafter-0")
    try:
        await expect(page.locator(".fleet .drafters .state-word")).to_have_text("gone")
        gone = f"Drafter {stack.state.drafters[0]} is gone"
        mark = screen.panel(panel).locator(".fleet-mark.gone").get_by_text(gone, exact=True).first
        await expect(mark).to_be_visible()
        # What was drafted before may have been read after the fleet was looked at.
        await page.wait_for_function(_GOES_ON_ALONE, arg=[panel, len(await screen.tokens(panel)) + 20])
        await mark.scroll_into_view_if_needed()
        await screen.picture("drafter-gone")
        await page.get_by_role("button", name="Stop").click()
        await expect(screen.panel(panel).locator(".state")).to_have_text("Stopped.")
        await screen.check_accessible()  # takes longer than the text may
        one, other = await screen.text(panel), await screen.text("Speculation off")
        shorter = min(len(one), len(other))
        assert shorter > 0
        assert one[:shorter] == other[:shorter]
    finally:
        stack.revive()
    await expect(page.locator(".fleet .drafters .state-word")).to_have_text("serving", timeout=LOADING_MS)


async def test_a_verifier_that_comes_back_is_waited_for(screen: Screen, stack: RunningStack) -> None:
    """The page counts down while the gateway waits; then the answer goes on as if nothing had been."""
    await screen.settings(Temperature="0", Max_tokens="1500")
    await screen.run()
    await until(screen, 20)
    stack.kill("verifier")
    try:
        await expect(screen.panel().locator(".state")).to_contain_text(
            re.compile(r"a verifier to come back: \d+ s left")
        )
    finally:
        stack.revive()
    num_tokens = await screen.num_tokens()
    await screen.page.locator(f'[data-token="{num_tokens + 20}"]').wait_for(state="attached", timeout=LOADING_MS)
    await screen.page.get_by_role("button", name="Stop").click()


async def test_a_refusal_is_said_in_words(screen: Screen) -> None:
    await screen.settings(Temperature="-1")
    await screen.run()
    alert = screen.page.get_by_role("alert")
    await expect(alert).to_contain_text("The request was refused.")
    await expect(alert).to_contain_text("temperature must be between 0 and 100, got -1.0")
    await expect(screen.page.get_by_label("Temperature")).to_have_attribute("aria-invalid", "true")
    await screen.check_accessible()
    await screen.settings(Temperature="0", Max_tokens="4")
    await screen.run()
    await screen.until_done()
    assert await alert.count() == 0


async def test_an_error_in_mid_stream_keeps_what_was_said(viewer: Viewer, service: ScriptedService) -> None:
    service.script.error, service.script.error_at = VerifierLost("the verifier was lost"), 3
    async with served(viewer, service) as url:
        screen = await viewer.open(url)
        await screen.run()
        await expect(screen.page.get_by_role("alert")).to_contain_text("The service is not available at the moment.")
        await expect(screen.page.get_by_role("alert")).to_contain_text("the verifier was lost")
        assert await screen.num_tokens() == 3 * service.script.commit_len
        await screen.check_accessible()


async def test_an_answer_that_failed_goes_on_from_its_last_event(viewer: Viewer, service: ScriptedService) -> None:
    service.script.error, service.script.error_at = VerifierLost("the verifier was lost"), 3
    async with served(viewer, service) as url:
        screen = await viewer.open(url)
        await screen.run()
        goes_on = screen.page.get_by_role("button", name="Continue after token 9")
        await goes_on.wait_for()
        service.script.error = None
        async with screen.page.expect_request("**/v1/streams/*") as resumed:
            await goes_on.click()
        await screen.until_done()
        assert (await resumed.value).headers["last-event-id"].endswith(":9")
        assert await screen.text() == service.script.text
        assert await screen.page.get_by_role("alert").count() == 0


async def test_a_broken_stream_is_taken_up_again(viewer: Viewer, service: ScriptedService) -> None:
    """The first answer is cut within its second event; the rest is asked for by the id of the first."""
    async with served(viewer, service) as url:
        screen = await viewer.open(url)

        async def cut(route: object) -> None:
            answer = await route.fetch()  # type: ignore[attr-defined]
            body = await answer.body()
            first = body.index(b"\n\n") + 2
            await route.fulfill(response=answer, body=body[: first + 40])  # type: ignore[attr-defined]

        await screen.page.route("**/v1/completions", cut)
        async with screen.page.expect_request("**/v1/streams/*") as resumed:
            await screen.run()
        await screen.until_done()
        assert (await resumed.value).headers["last-event-id"].endswith(":3")
        assert await screen.text() == service.script.text


async def test_speed_is_the_servers_however_late_the_events_come(viewer: Viewer, service: ScriptedService) -> None:
    """All at once, as through a proxy that buffers, or to a tab that was busy."""
    async with served(viewer, service) as url:
        screen = await viewer.open(url)

        async def at_once(route: object) -> None:
            await route.fulfill(response=await route.fetch())  # type: ignore[attr-defined]

        await screen.page.route("**/v1/completions", at_once)
        await screen.run()
        await screen.until_done()
        shown = await screen.panel().locator(".figures b").nth(1).inner_text()
        assert 0 < int(shown) <= service.script.commit_len / service.script.delay_s


async def test_a_key_is_asked_for_and_kept_in_the_tab(viewer: Viewer, service: ScriptedService, tmp_path: Path) -> None:
    config = GatewayConfig(port=0, grpc_port=0, api_keys_file=key_file(tmp_path))
    async with served(viewer, service, config) as url:
        screen = await viewer.open(url, wait=False)
        page = screen.page
        await expect(page.locator(".serving")).to_contain_text("an API key is required")
        field = page.get_by_label("API key", exact=True)
        await expect(field).to_be_visible()
        await screen.check_accessible()
        await field.fill("wrong")
        await field.press("Enter")
        await expect(page.locator(".serving")).not_to_contain_text("is required")
        await field.fill(ALICE)
        await field.press("Enter")
        await page.get_by_text("context of").wait_for()
        await screen.choose("Completion")
        await screen.run()
        await screen.until_done()
        assert service.requests[-1].owner == "alice"
        kept = await page.evaluate("[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]")
        assert [ALICE in place for place in kept] == [True, False, False]


async def test_a_gateway_that_is_gone(viewer: Viewer, service: ScriptedService) -> None:
    async with open_servers(service, GatewayConfig(port=0, grpc_port=0)) as servers:
        screen = await viewer.open(servers.url)
    await expect(screen.page.locator(".fleet .trouble")).to_contain_text("does not answer")
    await screen.run()
    await expect(screen.page.get_by_role("alert")).to_contain_text("The gateway does not answer.")
    # Refused; or reset, if it was asked while it went.
    assert all(complaint.startswith("Failed to load resource: net::ERR_") for complaint in viewer.complaints)
    viewer.complaints.clear()
