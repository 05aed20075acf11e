"""The documentation site: built strictly and offline, links and anchors followed, nothing loaded from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.blocks import ROOT, pages

_MARKDOWN_LINK = re.compile(r"\]\(([^)\s]+)\)")


class Html(HTMLParser):
    """Ids, links to follow, and what a browser loads by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(given["href"])
        elif "src" in given:
            self.loaded.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@cache
def html(path: Path) -> Html:
    return Html(path.read_text(encoding="utf-8"))


def html_pages(site: Path) -> list[Path]:
    return [path for path in site.rglob("*.html") if path.name != "404.html"]


def test_links_and_anchors_lead_somewhere(site: Path) -> None:
    problems = []
    for page in html_pages(site):
        for link in html(page).links:
            parts = urlsplit(link)
            if parts.scheme:
                if parts.scheme not in ("https", "http", "mailto") or not (parts.netloc or parts.path):
                    problems.append(f"{page.name}: {link} is no address")
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                problems.append(f"{page.name}: {link} is not there")
            elif parts.fragment and unquote(parts.fragment) not in html(target).ids | {""}:
                problems.append(f"{page.name}: {link} has no such anchor")
    assert not problems


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = {address for page in html_pages(site) for address in html(page).loaded}
    assert loaded
    assert not [address for address in loaded if urlsplit(address).netloc]
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_generated_pages_have_what_they_are_made_from(site: Path) -> None:
    for page, words in {
        "rest": ("/v1/chat/completions", "num_speculative_tokens"),
        "grpc": ("service Gateway", "SPECULATION_MODE_EXACT"),
        "cli": ("outrider up", "outrider train prepare-data"),
        "config": ("OUTRIDER_KV_CACHE_MB", "--draft-timeout-ms"),
        "metrics": ("outrider:spec_decode_num_accepted_tokens_total",),
    }.items():
        text = (site / f"reference/{page}.html").read_text(encoding="utf-8")
        assert all(word in text for word in words), page
    coming_from_vllm = (site / "coming-from-vllm.html").read_text(encoding="utf-8")
    assert "leave it out: the checkpoint says how its weights are quantised" in coming_from_vllm


def test_llms_txt_lists_every_page(site: Path) -> None:
    index = (site / "llms.txt").read_text(encoding="utf-8")
    listed = {site / name for name in re.findall(r"\]\(([^)]+\.html)\)", index)}
    assert listed == set(html_pages(site))
    assert "coupled sampling" in (site / "llms-full.txt").read_text(encoding="utf-8").lower()


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_between_files(page: Path) -> None:
    """As somebody sees them who reads the files themselves; pages that the site generates are not among them."""
    for link in _MARKDOWN_LINK.findall(page.read_text(encoding="utf-8")):
        parts = urlsplit(link)
        if parts.scheme or not parts.path or parts.path.startswith("reference/"):
            continue
        assert (page.parent / parts.path).exists(), link
