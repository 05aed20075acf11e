"""shared.healthcheck against a real gRPC server and a real HTTP server, through its own command line."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from outrider.shared import rpc
from outrider.shared.healthcheck import EXIT_NOT_WELL, EXIT_USAGE, EXIT_WELL, reason_not_well

HEALTHCHECK = str(Path(__file__).resolve().parents[2] / "shared/healthcheck.py")


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ready = self.path == "/ready"
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(b"yes" if ready else b"no verifier is serving")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def http_address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
async def grpc_server() -> AsyncIterator[rpc.Server]:
    server = await rpc.start_server("127.0.0.1", 0, lambda _: None, ())
    yield server
    await server.drain(0)


async def run(*targets: str) -> tuple[int, str]:
    """(exit code, output) of the command."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-IS", HEALTHCHECK, *targets),  # as the containers run it: with the standard library alone
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode if process.returncode is not None else -1, output.decode()


async def test_grpc_service_is_well_while_it_serves(grpc_server: rpc.Server) -> None:
    address = f"127.0.0.1:{grpc_server.port}"
    assert await run(address) == (EXIT_NOT_WELL, f"{address}: does not say SERVING\n")
    await grpc_server.serving()
    assert await run(address) == (EXIT_WELL, "")
    await grpc_server.health.enter_graceful_shutdown()
    assert (await run(address))[0] == EXIT_NOT_WELL


async def test_nobody_listens() -> None:
    server = await rpc.start_server("127.0.0.1", 0, lambda _: None, ())
    await server.drain(0)
    for target in (f"127.0.0.1:{server.port}", f"http://127.0.0.1:{server.port}/ready"):
        code, output = await run(target)
        assert code == EXIT_NOT_WELL
        assert target in output


async def test_http(http_address: str) -> None:
    assert await run(f"http://{http_address}/ready") == (EXIT_WELL, "")
    code, output = await run(f"http://{http_address}/other")
    assert code == EXIT_NOT_WELL
    assert output == f"http://{http_address}/other: 503 no verifier is serving\n"
    assert await run(f"{http_address}/ready") == (EXIT_WELL, "")
    assert await run(f"{http_address}/other") == (EXIT_NOT_WELL, f"{http_address}/other: 503 no verifier is serving\n")


async def test_one_bad_target_is_enough(grpc_server: rpc.Server, http_address: str) -> None:
    await grpc_server.serving()
    address = f"127.0.0.1:{grpc_server.port}"
    assert (await run(address, f"http://{http_address}/ready"))[0] == EXIT_WELL
    assert (await run(address, f"http://{http_address}/other"))[0] == EXIT_NOT_WELL


async def test_usage() -> None:
    for arguments in ((), ("--help",)):
        code, output = await run(*arguments)
        assert code == EXIT_USAGE
        assert output.startswith("usage:")


async def test_one_that_never_answers_is_not_waited_for_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        assert await asyncio.to_thread(reason_not_well, address, None, 0.2) == "timed out"
        assert await asyncio.to_thread(reason_not_well, f"{address}/ready", None, 0.2) == "timed out"


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"\0\0\7\0\1\0\0\0\1\0\0\0\0\2\x08\2", b"\xff" * 40])
async def test_another_kind_of_server(said: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await asyncio.to_thread(reason_not_well, address) == "does not say SERVING"


@pytest.mark.parametrize("target", ["nowhere", "a:b", ":1", "::1:7001", "a:1/\u00e9"])
def test_not_an_address(target: str) -> None:
    assert reason_not_well(target, None, 0.2)
