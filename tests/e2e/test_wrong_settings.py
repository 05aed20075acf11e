"""A wrong setting of a service ends its start at once, before weights are read or Redis is waited for, and is named."""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from outrider.drafter_service.start import serve as serve_drafter
from outrider.gateway.__main__ import serve as serve_gateway
from outrider.shared.errors import ConfigError
from outrider.verifier_service.start import serve as serve_verifier
from tests.ports import nobodys_port

ROOT = Path(__file__).parents[2]
TARGET, DRAFT, HEAD = (str(ROOT / "models" / name) for name in ("demo-target", "demo-draft", "demo-eagle3"))
GATEWAY = ["--model", TARGET, "--grpc-port", "0"]
VERIFIER = ["--model", TARGET]
DRAFTER = ["--draft-model", DRAFT, "--target-model", TARGET]
SERVE: dict[str, tuple[Callable[[list[str]], Awaitable[None]], list[str]]] = {
    "gateway": (serve_gateway, GATEWAY),
    "verifier": (serve_verifier, VERIFIER),
    "drafter": (serve_drafter, DRAFTER),
}


@pytest.fixture
def busy_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


async def refused(service: str, *arguments: str, caplog: pytest.LogCaptureFixture) -> str:
    """The refusal. Nothing was loaded before."""
    serve, usual = SERVE[service]
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError) as error:
        await serve([*usual, *arguments])
    assert "reading" not in caplog.text
    assert "waiting for Redis" not in caplog.text
    return error.value.message


@pytest.mark.parametrize(
    ("service", "setting"),
    [
        ("gateway", "--port"),
        ("gateway", "--grpc-port"),
        ("verifier", "--port"),
        ("verifier", "--metrics-port"),
        ("drafter", "--port"),
        ("drafter", "--metrics-port"),
    ],
)
async def test_a_busy_port(service: str, setting: str, busy_port: str, caplog: pytest.LogCaptureFixture) -> None:
    message = await refused(service, setting, busy_port, caplog=caplog)
    assert message.startswith(f"{setting}: cannot listen on 127.0.0.1:{busy_port}: ")


@pytest.mark.parametrize(
    ("service", "arguments", "said"),
    [
        ("gateway", ("--verifiers", "verifier"), "--verifiers: 'verifier' is not host:port"),
        ("gateway", ("--drafters", "a:7002,b:"), "--drafters: 'b:' is not host:port"),
        ("gateway", ("--redis-url", "http://db"), "--redis-url: Redis URL must specify"),
        ("gateway", ("--model", "/no/such/folder"), "--model: /no/such/folder does not exist"),
        ("gateway", ("--speculative-config", '{"method": "foo"}'), "--speculative-config: method 'foo'"),
        ("gateway", ("--chat-template", "/no/such/file"), "--chat-template: /no/such/file: No such file"),
        ("gateway", ("--chat-template", "{% if %}"), "--chat-template: the chat template does not compile"),
        ("gateway", ("--port", "7009", "--grpc-port", "7009"), "--grpc-port: 7009 is --port already"),
        ("gateway", ("--host", "no.such.host.invalid"), "--host: no.such.host.invalid is not an address"),
        ("verifier", ("--dtype", "int4"), "--dtype: 'int4' is not one of"),
        ("verifier", ("--local-methods", "foo"), "--local-methods: 'foo' is not one of"),
        ("verifier", ("--local-methods", "eagle3"), "--local-draft-model: method eagle3 needs a checkpoint"),
        ("verifier", ("--local-draft-model", f"{DRAFT},{DRAFT}"), f"--local-draft-model: {DRAFT} and {DRAFT} are both"),
        ("verifier", ("--local-draft-model", "/no/such/folder"), "--local-draft-model: /no/such/folder"),
        ("verifier", ("--prompt-lookup-min", "9"), "--prompt-lookup-min is larger than --prompt-lookup-max"),
        ("verifier", ("--port", "7009", "--metrics-port", "7009"), "--metrics-port: 7009 is --port already"),
        ("drafter", ("--draft-model", f"{HEAD},{DRAFT},{HEAD}"), f"--draft-model: {HEAD} and {HEAD} are both eagle3"),
        ("drafter", ("--draft-model", f"{DRAFT},{HEAD}", "--target-model", ""), "--target-model: eagle3 uses"),
        ("drafter", ("--methods", "ngram,ngram"), "--methods: 'ngram' is given twice"),
    ],
)
async def test_it_is_named(
    service: str, arguments: tuple[str, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await refused(service, "--port", "0", *arguments, caplog=caplog)).startswith(said)


async def test_a_checkpoint_that_is_refused_names_the_setting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copy(Path(TARGET) / "config.json", tmp_path)
    message = await refused("verifier", "--port", "0", "--model", str(tmp_path), caplog=caplog)
    assert message.startswith(f"--model: {tmp_path}: ")


@pytest.mark.storm
def test_redis_that_does_not_answer_is_named() -> None:
    """The core is client/doctor's: `outrider up` looks first. A gateway alone waits, as Redis may be restarting."""
    command = [sys.executable, "-m", "outrider.gateway", *GATEWAY, "--port", "0", "--redis-patience-s", "0.5"]
    done = subprocess.run(
        [*command, "--redis-url", f"redis://127.0.0.1:{nobodys_port()}/0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "--redis-url: Redis does not answer" in done.stderr
