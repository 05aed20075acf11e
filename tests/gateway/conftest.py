"""The demo model's tokenizer, a service that plays a script, and an HTTP client straight into the app."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from gateway_script import DEMO_TARGET, ScriptedService

from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.servers.http.app import create_app


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO_TARGET)


@pytest.fixture
def service(tokenizer: Tokenizer) -> ScriptedService:
    return ScriptedService(tokenizer)


@pytest.fixture
async def http(service: ScriptedService) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
