"""The playground as somebody who looks at it: opening it, running a request, reading what is on the screen."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page, Request, expect

IMAGES = Path(__file__).parents[2] / "docs" / "images"
DESK, PHONE = (1280, 900), (390, 844)
# What is promised in seconds is not asserted here; a busy machine must not fail a test.
PATIENCE_MS = 60_000.0
# Chromium itself reports every answer that is not a success; a refused request is one.
REFUSAL_REPORT = "Failed to load resource: the server responded with a status of"


@dataclass
class Viewer:
    """complaints: errors and warnings on the console, and exceptions; elsewhere: requests to any other host."""

    browser: Browser
    complaints: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    _contexts: list[BrowserContext] = field(default_factory=list)

    async def open(
        self,
        url: str,
        *,
        kind: str = "Completion",
        scheme: str = "light",
        size: tuple[int, int] = DESK,
        touch: bool = False,
        wait: bool = True,
    ) -> Screen:
        context = await self.browser.new_context(
            color_scheme="dark" if scheme == "dark" else "light",
            viewport={"width": size[0], "height": size[1]},
            has_touch=touch,
            reduced_motion="reduce",
        )
        context.set_default_timeout(PATIENCE_MS)
        self._contexts.append(context)
        page = await context.new_page()
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self._on_request(request, url))
        await page.goto(url)
        screen = Screen(page)
        if wait:
            await page.get_by_text("context of").wait_for()
            await page.locator(".fleet .node.gateway").wait_for()
            # The effect that names the model chooses the kind too; what a test chooses must come after it.
            await expect(page).to_have_title(re.compile(" · "))
            await screen.choose(kind)
        return screen

    async def close(self) -> None:
        while self._contexts:
            await self._contexts.pop().close()

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(REFUSAL_REPORT):
            self.complaints.append(message.text)

    def _on_request(self, request: Request, url: str) -> None:
        if not request.url.startswith((f"{url}/", "data:")):
            self.elsewhere.append(request.url)


@dataclass(frozen=True)
class Token:
    """As it is drawn: its text, the class that says its origin."""

    text: str
    origin: str


@dataclass
class Screen:
    page: Page

    async def choose(self, kind: str) -> None:
        """Chat or Completion."""
        await self.page.get_by_text(kind, exact=True).click()

    async def send(self, message: str) -> None:
        """Of a chat."""
        await self.page.get_by_label("Message", exact=True).fill(message)
        await self.page.get_by_role("button", name="Send").click()

    async def settings(self, **fields: str) -> None:
        """By the labels' text, underscores for spaces."""
        for label, value in fields.items():
            control = self.page.get_by_label(label.replace("_", " "), exact=True)
            is_select = await control.evaluate("element => element.tagName === 'SELECT'")
            await (control.select_option(value) if is_select else control.fill(value))

    async def run(self) -> None:
        await self.page.get_by_role("button", name="Run").click()

    async def until_done(self, title: str = "Answer") -> None:
        await self.panel(title).locator(".state").get_by_text("Done").wait_for()

    def panel(self, title: str = "Answer") -> Any:
        return self.page.get_by_role("article", name=title)

    async def tokens(self, title: str = "Answer") -> list[Token]:
        rows = (
            await self.panel(title)
            .locator("[data-token]")
            .evaluate_all("spans => spans.map(span => [span.textContent, span.classList[1]])")
        )
        return [Token(*row) for row in rows]

    async def text(self, title: str = "Answer") -> str:
        return "".join(token.text for token in await self.tokens(title))

    async def num_tokens(self) -> int:
        return len(await self.tokens())

    async def requested(self) -> Any:
        """The body of the completion that the next click on Run asks for."""
        async with self.page.expect_request(lambda request: "/v1/" in request.url and request.method == "POST") as sent:
            await self.run()
        return (await sent.value).post_data_json

    async def check_accessible(self) -> None:
        """By axe, with all its rules."""
        results = await Axe().run(self.page)
        assert results.violations_count == 0, results.generate_report()

    async def picture(self, name: str) -> None:
        """Into the documentation, when it is to be made anew."""
        if takes_pictures():
            await self.page.mouse.wheel(0, -10_000)
            await self.page.screenshot(path=IMAGES / f"playground-{name}.png", full_page=True)


def takes_pictures() -> bool:
    return bool(os.environ.get("PLAYGROUND_SCREENSHOTS"))


async def until(screen: Screen, num_tokens: int, panel: str | None = None) -> None:
    """Until the answer, that in the panel where two are compared, has more tokens than that."""
    place = screen.page if panel is None else screen.panel(panel)
    await expect(place.locator(f'[data-token="{num_tokens}"]')).to_be_attached()
