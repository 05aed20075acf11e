"""A real Chromium on a real stack. Without a browser these tests are skipped; `make browser` installs Debian's.

PLAYGROUND_SCREENSHOTS=1 makes them write the pictures of the documentation into docs/images.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator

import pytest
from browsing import PATIENCE_MS, Screen, Viewer
from playwright.async_api import Browser, async_playwright, expect

from tests.e2e.e2e_stack import DEMO_DRAFT, RunningStack, run_stack

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Its path."""
    found = next((path for path in map(shutil.which, _NAMES) if path), None)
    if found is None:
        pytest.skip(f"no browser on the PATH ({', '.join(_NAMES)}): `make browser` installs chromium")
    return found


@pytest.fixture(scope="session")
async def browser(chromium: str) -> AsyncIterator[Browser]:
    # Chromium refuses its sandbox to root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    expect.set_options(timeout=PATIENCE_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=arguments, timeout=PATIENCE_MS)
        yield browser
        await browser.close()


@pytest.fixture(scope="session")
def stack(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The demo family, as `make demo` serves it but for its pace; who kills a part of it revives it."""
    run_dir = tmp_path_factory.mktemp("playground")
    with run_stack(run_dir, dtype="auto", draft_model=DEMO_DRAFT, is_paced=True) as running:
        yield running


@pytest.fixture
async def viewer(browser: Browser) -> AsyncIterator[Viewer]:
    """Opens pages; at the end, none of them may have complained, or looked elsewhere."""
    viewer = Viewer(browser)
    yield viewer
    await viewer.close()
    assert viewer.complaints == []
    assert viewer.elsewhere == []


@pytest.fixture
async def screen(viewer: Viewer, stack: RunningStack) -> Screen:
    """The playground on a desk, in light colours."""
    return await viewer.open(stack.url)
