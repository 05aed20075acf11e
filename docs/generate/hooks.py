"""Hooks that mkdocs calls while it builds the site (mkdocs.yml, `hooks`): generated pages and tables, links, llms.txt.

Run from the repository's root, `python -m mkdocs build --strict`, so that this package and the services are found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.generate.cli_page import cli_page
from docs.generate.config_page import config_page
from docs.generate.grpc_page import grpc_page
from docs.generate.llms import full_text, index_text
from docs.generate.metrics_page import metrics_page
from docs.generate.plots_page import pictures, plots_page
from docs.generate.rest_page import rest_page
from docs.generate.vllm_tables import TABLES

ROOT = Path(__file__).parents[2]
PAGES: Mapping[str, Callable[[], str]] = {
    "reference/rest.md": rest_page,
    "reference/grpc.md": grpc_page,
    "reference/cli.md": cli_page,
    "reference/config.md": config_page,
    "reference/metrics.md": metrics_page,
    "plots.md": plots_page,
}
# Files outside docs/ that are pages of the site; other links out of docs/ are left as text.
_PAGES_OF_FILES = {
    "deploy/kubernetes/README.md": "kubernetes.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# Where the pages' texts are kept for llms.txt.
_SOURCES = "page_sources"
_TABLE = re.compile(r"<!-- table: ([a-z-]+) -->")
_CHECK = re.compile(r"^<!-- check: .* -->\n", re.MULTILINE)
_LINK_OUT = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)\)")
_LINK_IN = re.compile(r"\]\(docs/([^)\s]+)\)")


def on_files(files: Files, *, config: MkDocsConfig, **_: Any) -> Files:
    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    for source, name in _PAGES_OF_FILES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    for name, (_title, picture) in pictures().items():
        files.append(File.generated(config, name, content=picture))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    text = site_markdown(markdown)
    config.extra.setdefault(_SOURCES, {})[page.file.src_uri] = text
    return text


def on_post_build(*, config: MkDocsConfig, **_: Any) -> None:
    site, nav, sources = Path(config.site_dir), config.nav or [], config.extra[_SOURCES]
    (site / "llms.txt").write_text(index_text(nav, sources), encoding="utf-8")
    (site / "llms-full.txt").write_text(full_text(nav, sources), encoding="utf-8")


def site_markdown(markdown: str) -> str:
    """A page as the site has it: tables filled in, notes for the tests left out, links kept within the site."""
    markdown = _CHECK.sub("", markdown)
    markdown = _TABLE.sub(lambda found: TABLES[found.group(1)](), markdown)
    markdown = _LINK_IN.sub(r"](\1)", markdown)
    return _LINK_OUT.sub(_inside, markdown)


def _inside(link: re.Match[str]) -> str:
    page = _PAGES_OF_FILES.get(link.group(2).removeprefix("../"))
    return f"[{link.group(1)}]({page})" if page else link.group(1)
