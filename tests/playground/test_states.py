"""Fourteen states of the page, light, dark and on a phone: accessible, and no wider than the window, in each of them.

PLAYGROUND_SCREENSHOTS=1 writes a sheet of each look into docs/images: playground-states-{light,dark,phone}.png.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import pytest
from browsing import DESK, IMAGES, PHONE, Screen, Viewer, takes_pictures
from playwright.async_api import FloatRect, Locator, expect

from outrider.gateway.config import GatewayConfig
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.errors import VerifierLost
from tests.e2e.e2e_stack import RunningStack
from tests.gateway.gateway_script import DEMO_TARGET, Script, ScriptedService
from tests.gateway.gateway_servers import key_file, open_servers

pytestmark = pytest.mark.storm

LOOKS = {"light": ("light", DESK), "dark": ("dark", DESK), "phone": ("light", PHONE)}
# pixels; width of a picture on its sheet, and pictures side by side
_WIDTHS = {DESK: (640, 3), PHONE: (300, 5)}
ANSWER = """Three things help most:

1. **Regular hours**: go to bed and get up at the same time.
2. **A dark, cool room**: 16 to 19 degrees.
3. **No screens** in the last hour.

```python
def asleep(hour: int) -> bool:
    return hour >= 22 or hour < 6
```

> What you read before it should not be this page."""


@dataclass
class Look:
    """One colour scheme and size, a gateway that follows a script, and one that needs a key."""

    viewer: Viewer
    scheme: str
    size: tuple[int, int]
    stack: RunningStack
    url: str
    locked_url: str
    service: ScriptedService
    shots: list[tuple[str, bytes]] = field(default_factory=list)

    async def open(self, url: str, kind: str = "Chat", *, wait: bool = True) -> Screen:
        return await self.viewer.open(url, kind=kind, scheme=self.scheme, size=self.size, wait=wait)

    async def chat(self, script: Script) -> Screen:
        self.service.script = script
        return await self.open(self.url)

    async def set(self, screen: Screen, **fields: str) -> None:
        """Unfolds the settings where they are folded away."""
        heading = screen.page.get_by_text("Settings", exact=True)
        folded = self.size == PHONE
        if folded:
            await heading.click()
        await screen.settings(**fields)
        if folded:
            await heading.click()


State = Callable[[Look], Awaitable[Screen]]


async def box(element: Locator) -> FloatRect:
    found = await element.bounding_box()
    assert found is not None
    return found


async def new_chat(look: Look) -> Screen:
    return await look.chat(Script())


async def answer_comes(look: Look) -> Screen:
    screen = await look.chat(Script(ANSWER, delay_s=0.02, endless=True))
    await screen.send("How do I sleep well?")
    await screen.page.get_by_text("should not be this page").wait_for()
    return screen


async def answer_done(look: Look) -> Screen:
    screen = await look.chat(Script(ANSWER, delay_s=0.02))
    await screen.send("How do I sleep well?")
    await screen.until_done()
    return screen


async def tokens_marked(look: Look) -> Screen:
    screen = await answer_done(look)
    await screen.page.get_by_role("switch", name="Mark accepted tokens").check()
    return screen


async def compared(look: Look) -> Screen:
    screen = await look.open(look.stack.url, "Completion")
    await look.set(screen, Method="draft_model", Draft_length="4", Temperature="0", Max_tokens="80")
    await screen.page.get_by_role("switch", name="Compare with speculation off").check()
    await screen.run()
    await expect(screen.page.locator(".verdict")).to_contain_text("Identical.")
    if look.size == DESK:
        one, other = [await box(screen.panel(f"Speculation {word}").locator(".text")) for word in ("on", "off")]
        assert one["y"] == other["y"]
    await screen.page.locator(".verdict").scroll_into_view_if_needed()
    return screen


async def stopped(look: Look) -> Screen:
    screen = await answer_comes(look)
    await screen.page.get_by_role("button", name="Stop").click()
    await expect(screen.panel().locator(".state")).to_have_text("Stopped.")
    return screen


async def waiting_for_a_verifier(look: Look) -> Screen:
    screen = await look.chat(Script())
    refusal = {"error": {"message": "no verifier", "type": "unavailable", "param": None, "code": 503}}
    await screen.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=503, json=refusal, headers={"retry-after": "600"}),
    )
    await screen.send("Are you there?")
    await expect(screen.panel().locator(".state")).to_contain_text("Asking again in")
    return screen


async def earlier_chats(look: Look) -> Screen:
    screen = await answer_done(look)
    await screen.page.reload()
    await screen.page.get_by_text("Ask something").wait_for()
    await screen.page.get_by_label("Earlier chats").select_option(label="How do I sleep well?")
    await screen.page.locator(".turn.assistant .markdown").wait_for()
    return screen


async def new_completion(look: Look) -> Screen:
    return await look.open(look.stack.url, "Completion")


async def completion_and_its_rounds(look: Look) -> Screen:
    screen = await new_completion(look)
    await look.set(screen, Method="draft_model", Draft_length="4", Temperature="0", Max_tokens="80")
    await screen.run()
    await screen.until_done()
    await screen.page.locator(".charts").scroll_into_view_if_needed()
    await screen.page.locator(".fleet").scroll_into_view_if_needed()
    return screen


async def card_of_a_token(look: Look) -> Screen:
    screen = await new_completion(look)
    await look.set(screen, Method="draft_model", Draft_length="4", Temperature="0", Max_tokens="60")
    await screen.run()
    await screen.until_done()
    await screen.panel().locator(".token.accepted:not(.blank)").last.click()
    await expect(screen.page.get_by_role("tooltip")).to_contain_text("Round")
    if look.size == PHONE:  # on a desk the answer has room below
        card, view = await box(screen.page.get_by_role("tooltip")), await box(screen.page.locator(".answer"))
        assert view["y"] <= card["y"]
        assert card["y"] + card["height"] <= view["y"] + view["height"]
    return screen


async def refused(look: Look) -> Screen:
    screen = await new_completion(look)
    await look.set(screen, Temperature="-1")
    await screen.run()
    await expect(screen.page.get_by_role("alert")).to_contain_text("The request was refused.")
    await expect(screen.page.get_by_role("alert")).to_be_in_viewport()
    await expect(screen.page.locator(".legend")).to_have_count(0)  # of no tokens
    await expect(screen.panel().locator(".figures")).to_have_text("")
    return screen


async def lost_in_mid_stream(look: Look) -> Screen:
    screen = await look.chat(Script(ANSWER, error=VerifierLost("the verifier was lost"), error_at=20))
    await screen.send("How do I sleep well?")
    await screen.page.get_by_role("button", name=re.compile("Continue after token")).wait_for()
    return screen


async def key_is_needed(look: Look) -> Screen:
    screen = await look.open(look.locked_url, wait=False)
    await expect(screen.page.locator(".serving")).to_have_text("an API key is required")  # no advice for programs
    form = await box(screen.page.locator(".menu form"))
    assert form["x"] >= 0
    assert form["x"] + form["width"] <= look.size[0]
    return screen


STATES: tuple[State, ...] = (
    new_chat,
    answer_comes,
    answer_done,
    tokens_marked,
    compared,
    stopped,
    waiting_for_a_verifier,
    earlier_chats,
    new_completion,
    completion_and_its_rounds,
    card_of_a_token,
    refused,
    lost_in_mid_stream,
    key_is_needed,
)


@asynccontextmanager
async def looking(name: str, viewer: Viewer, stack: RunningStack, folder: Path) -> AsyncIterator[Look]:
    scheme, size = LOOKS[name]
    service = ScriptedService(Tokenizer.load(DEMO_TARGET))
    async with AsyncExitStack() as servers:
        configs = (
            GatewayConfig(port=0, grpc_port=0),
            GatewayConfig(port=0, grpc_port=0, api_keys_file=key_file(folder)),
        )
        opened, locked = [await servers.enter_async_context(open_servers(service, config)) for config in configs]
        yield Look(viewer, scheme, size, stack, opened.url, locked.url, service)
        await viewer.close()  # before the servers, or the pages would complain of it


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LOOKS)
async def test_every_state(viewer: Viewer, stack: RunningStack, tmp_path: Path, name: str) -> None:
    async with looking(name, viewer, stack, tmp_path) as look:
        for state in STATES:
            screen = await state(look)
            width = await screen.page.evaluate("document.documentElement.scrollWidth")
            assert width <= look.size[0], f"{state.__name__} is {width} pixels wide"
            await screen.check_accessible()
            if takes_pictures():
                look.shots.append((state.__name__.replace("_", " "), await screen.page.screenshot()))
            await viewer.close()
        if look.shots:
            sheet = await asyncio.to_thread(sheet_of, look.shots, *_WIDTHS[look.size], look.scheme)
            (IMAGES / f"playground-states-{name}.png").write_bytes(sheet)


def sheet_of(shots: list[tuple[str, bytes]], width: int, num_columns: int, scheme: str) -> bytes:
    """The pictures in rows, each under its name, as one small PNG."""
    from PIL import Image, ImageDraw

    ground, ink = ("#0b0c0d", "#e6e4dd") if scheme == "dark" else ("#d9d5ca", "#1d2321")
    pictures = [(name, Image.open(BytesIO(shot)).convert("RGB")) for name, shot in shots]
    height = round(width * pictures[0][1].height / pictures[0][1].width)
    gap, title = 16, 24
    num_rows = -(-len(pictures) // num_columns)
    size = (gap + num_columns * (width + gap), gap + num_rows * (height + title + gap))
    sheet = Image.new("RGB", size, ground)
    draw = ImageDraw.Draw(sheet)
    for place, (name, picture) in enumerate(pictures):
        left = gap + place % num_columns * (width + gap)
        top = gap + place // num_columns * (height + title + gap)
        draw.text((left, top), name, fill=ink, font_size=15)
        sheet.paste(picture.resize((width, height), Image.Resampling.LANCZOS), (left, top + title))
    out = BytesIO()
    sheet.quantize(128, kmeans=1, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()
