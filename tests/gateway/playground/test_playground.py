"""The playground's files: as new as their sources, shipped, and served so that a browser runs nothing else.

What the page does is tested in tests/playground, in a browser.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import httpx
import pytest
from gateway_script import ScriptedService
from gateway_servers import ALICE, key_file, open_servers

from outrider.gateway.config import GatewayConfig
from outrider.gateway.playground.page import STATIC

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "gateway" / "playground" / "web"
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MOST_BYTES = 260_000


def test_the_bundle_is_as_new_as_its_sources() -> None:
    """`make playground` mends it. As in build.mjs: path, length and bytes of every file, in the order of paths."""
    names = ["build.mjs", "package-lock.json", "package.json", "tsconfig.json"]
    names += [path.relative_to(SOURCES).as_posix() for path in (SOURCES / "src").rglob("*") if path.is_file()]
    digest = hashlib.sha256()
    for name in sorted(names):
        content = (SOURCES / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    assert (STATIC / "sources.sha256").read_text().strip() == digest.hexdigest()


def test_it_is_small_and_shipped() -> None:
    files = list(STATIC.iterdir())
    assert sum(path.stat().st_size for path in files if path.suffix != ".gz") < MOST_BYTES
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    [pattern] = settings["package-data"]["outrider.gateway.playground"]
    assert set((ROOT / "outrider" / "gateway" / "playground").glob(pattern)) == set(files)


async def test_the_page_and_all_it_names(http: httpx.AsyncClient) -> None:
    page = await http.get("/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(named) == 5
    types = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".woff2": "font/woff2"}
    for name in named:
        file = await http.get(f"/{name}")
        assert (file.status_code, file.content) == (200, (STATIC / Path(name).name).read_bytes())
        assert file.headers["content-type"] == types.get(Path(name).suffix, "image/svg+xml")
        assert file.headers["x-content-type-options"] == "nosniff"
    assert (await http.get("/playground/licenses.txt")).text.count("SIL OPEN FONT LICENSE") == 2
    assert (await http.get("/playground/sources.sha256")).status_code == 404


async def test_the_documentation_needs_no_other_host(http: httpx.AsyncClient) -> None:
    page = (await http.get("/docs")).text
    named = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(named) == 3
    assert "://" not in page
    types = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
    for name in named:
        file = await http.get(f"/{name}")
        assert (file.status_code, file.headers["content-type"]) == (200, types[Path(name).suffix])
    script = next(name for name in named if name.endswith(".js"))
    assert b"SwaggerUIBundle" in (await http.get(f"/{script}")).content
    assert "openapi.json" in page
    assert (await http.get("/openapi.json")).status_code == 200


async def test_nothing_but_its_own_files_may_run(http: httpx.AsyncClient) -> None:
    page = await http.get("/", headers=BROWSER)
    policy = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert not re.search(r"<script(?![^>]+src=)|<style|style=|\son\w+=", page.text)


async def test_the_page_is_asked_for_again_and_its_files_are_not(http: httpx.AsyncClient) -> None:
    page = await http.get("/", headers=BROWSER)
    assert (page.headers["cache-control"], page.headers["vary"]) == ("no-cache", "accept")
    again = await http.get("/", headers={**BROWSER, "if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    [script] = re.findall(r'src="([^"]+)"', page.text)
    assert (await http.get(f"/{script}")).headers["cache-control"] == "public, max-age=31536000, immutable"


@pytest.mark.parametrize("accept", ["*/*", "application/json"])
async def test_other_clients_are_told_where_the_api_is(http: httpx.AsyncClient, accept: str) -> None:
    answer = await http.get("/", headers={"accept": accept})
    assert answer.json() == {"name": "outrider", "version": "1.2.3", "api": "/v1", "docs": "/docs"}
    assert answer.headers["vary"] == "accept"
    assert (await http.head("/", headers=BROWSER)).status_code == 200
    assert (await http.post("/", json={})).status_code == 405


async def test_the_page_needs_no_key_and_nothing_else_is_opened_by_it(service: ScriptedService, tmp_path: Path) -> None:
    config = GatewayConfig(port=0, grpc_port=0, api_keys_file=key_file(tmp_path))
    async with open_servers(service, config) as servers, httpx.AsyncClient(base_url=servers.url) as client:
        page = await client.get("/", headers=BROWSER)
        assert page.status_code == 200
        [script] = re.findall(r'src="([^"]+)"', page.text)
        assert (await client.get(f"/{script}")).status_code == 200
        for path in ("/v1/models", "/fleet", "/playground", "/playground/../v1/models", "/playground/%2e%2e/fleet"):
            assert (await client.get(path)).status_code in (401, 404)
        assert (await client.get("/v1/models", headers={"authorization": f"Bearer {ALICE}"})).status_code == 200


async def test_it_can_be_turned_off(service: ScriptedService) -> None:
    config = GatewayConfig(port=0, grpc_port=0, playground=False)
    async with open_servers(service, config) as servers, httpx.AsyncClient(base_url=servers.url) as client:
        assert (await client.get("/", headers=BROWSER)).status_code == 404
        assert (await client.get("/playground/favicon.svg")).status_code == 404
