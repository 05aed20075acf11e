"""Who can use the page: from a keyboard, on a phone, in light and dark, with a screen reader (by axe's rules)."""

from __future__ import annotations

import pytest
from browsing import PHONE, Screen, Viewer
from playwright.async_api import expect

from tests.e2e.e2e_stack import RunningStack

pytestmark = pytest.mark.storm

_FOCUSED = "(one => one.getAttribute('aria-label') || one.id || one.getAttribute('role') || '')(document.activeElement)"
_IS_DRAWN = """isLight => {
  const [red, green, blue] = getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g);
  return (0.2126 * red + 0.7152 * green + 0.0722 * blue > 128) === isLight; }"""


async def tab_to(screen: Screen, name: str, key: str = "Tab") -> None:
    """By the keyboard alone, as anybody would have to."""
    for _ in range(60):
        await screen.page.keyboard.press(key)
        if name in await screen.page.evaluate(_FOCUSED):
            return
    raise AssertionError(f"{name!r} cannot be reached by {key}")


async def until_drawn_in(screen: Screen, scheme: str) -> None:
    """The page takes up a scheme a moment after it was chosen."""
    await screen.page.wait_for_function(_IS_DRAWN, arg=scheme == "light")


async def test_everything_works_from_a_keyboard(screen: Screen) -> None:
    keyboard = screen.page.keyboard
    await tab_to(screen, "Prompt")
    await keyboard.press("Control+A")
    await keyboard.type("def main():")
    await tab_to(screen, "max_tokens")
    await keyboard.press("Control+A")
    await keyboard.type("30")
    await tab_to(screen, "Prompt", "Shift+Tab")
    await keyboard.press("Control+Enter")
    await screen.until_done()
    await tab_to(screen, "arrow keys")
    await keyboard.press("ArrowRight")
    await keyboard.press("ArrowRight")
    said = screen.panel().locator("[aria-live]")
    await expect(said).to_contain_text("Token 2, ")
    await expect(said).to_contain_text("probability")
    card = screen.page.get_by_role("tooltip")
    await expect(card).to_be_visible()
    await keyboard.press("Home")
    await expect(said).to_contain_text("Token 1, ")
    await keyboard.press("Escape")
    await expect(card).to_have_count(0)
    outline = await screen.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"  # where the focus is can be seen


async def test_ctrl_enter_sends_from_anywhere(screen: Screen) -> None:
    await screen.page.get_by_label("Temperature").press("Control+Enter")
    await screen.until_done()
    await screen.page.evaluate("document.activeElement.blur()")
    async with screen.page.expect_request("**/v1/completions"):
        await screen.page.keyboard.press("Control+Enter")
    await screen.until_done()


async def test_what_this_is_and_where_its_documentation_is(screen: Screen) -> None:
    about = screen.page.locator("header .about")
    await expect(about).to_contain_text("Outrider serves language models with speculative decoding")
    link = await about.get_by_role("link").get_attribute("href")
    assert link is not None
    assert (await screen.page.request.get(f"{screen.page.url}{link}")).ok


async def test_the_switch_and_the_tabs_from_a_keyboard(screen: Screen) -> None:
    keyboard, page = screen.page.keyboard, screen.page
    await tab_to(screen, "switch")
    await keyboard.press("Space")
    await expect(page.get_by_role("switch", name="Mark accepted tokens")).not_to_be_checked()
    await page.get_by_role("radio", name="Completion").focus()
    await keyboard.press("ArrowLeft")
    await expect(page.get_by_label("Message", exact=True)).to_be_visible()


async def test_on_a_phone(viewer: Viewer, stack: RunningStack) -> None:
    screen = await viewer.open(stack.url, size=PHONE, touch=True)
    page = screen.page
    heading, temperature = page.get_by_text("Settings", exact=True), page.get_by_label("Temperature")
    assert not await temperature.is_visible()  # the settings are folded away
    await heading.tap()
    await screen.settings(Method="draft_model", Draft_length="4")  # `auto` may find that drafts do not pay here
    await temperature.fill("0")
    assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    await heading.tap()
    await expect(temperature).not_to_be_visible()
    await page.get_by_role("button", name="Run").tap()
    await screen.until_done()
    token = screen.panel().locator(".token.accepted:not(.blank)").last
    await token.tap()
    card = page.get_by_role("tooltip")
    await expect(card).to_contain_text("Round")
    box = await card.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= PHONE[0]
    assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    await screen.check_accessible()
    await screen.picture("phone")


async def test_light_and_dark(viewer: Viewer, stack: RunningStack) -> None:
    """As the system says, unless the reader says otherwise, and that is remembered."""
    for scheme, other in (("light", "dark"), ("dark", "light")):
        screen = await viewer.open(stack.url, scheme=scheme)
        await until_drawn_in(screen, scheme)
        await screen.check_accessible()
        await screen.page.get_by_label("Theme").select_option(other)
        await until_drawn_in(screen, other)
        await screen.check_accessible()
        await screen.page.reload()
        await screen.page.get_by_text("context of").wait_for()
        await until_drawn_in(screen, other)
        await expect(screen.page.get_by_label("Theme")).to_have_value(other)
