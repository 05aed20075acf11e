"""Peers that vanish without a word (SIGSTOP looks like a pulled cable): the other side notices and frees what it held.

It takes as long as it takes: 15 s on a channel, 40 s on a server. Both are waited for at once.
`python -m tests.shared.vanished_peers`: exit code 1 and a traceback when one of them is not noticed in time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from outrider.shared import rpc

METHOD = "/test/Wait"
CHANNEL_NOTICES_WITHIN_S = 25.0
SERVER_NOTICES_WITHIN_S = 50.0
SERVER = """
import asyncio
from outrider.shared import rpc
async def main():
    server = await rpc.start_server("127.0.0.1", 0, lambda _: None, ())
    await server.serving()
    print(server.port, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
CLIENT = """
import asyncio, sys
from outrider.shared import rpc
async def main():
    async with rpc.open_channel(sys.argv[1]) as channel:
        async for _ in channel.unary_stream("/test/Wait")(b""):
            print("begun", flush=True)
asyncio.run(main())
"""


class Waiting(grpc.GenericRpcHandler):
    """One method that sends one message and then waits; `ended` when it was cut."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_stream_rpc_method_handler(self._wait)  # type: ignore[arg-type]

    async def _wait(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"begun"
            await asyncio.Event().wait()
        finally:
            self.ended.set()


@asynccontextmanager
async def started(code: str, *arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process and the first line it prints. It ends with this one, however early that is interrupted."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode().strip()
        assert line
        yield process, line
    finally:
        process.kill()
        await process.wait()


async def stop_for_good(process: asyncio.subprocess.Process, noticed: Any, within_s: float) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    async with asyncio.timeout(within_s):
        await noticed


async def a_server_vanishes() -> None:
    async with started(SERVER) as (process, port), rpc.open_channel(f"127.0.0.1:{port}") as channel:
        watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
        call = watch(b"")
        await call.read()
        await stop_for_good(process, call.code(), CHANNEL_NOTICES_WITHIN_S)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def a_client_vanishes() -> None:
    waiting = Waiting()
    server = await rpc.start_server("127.0.0.1", 0, lambda grpc_server: add(grpc_server, waiting), ())
    async with started(CLIENT, f"127.0.0.1:{server.port}") as (process, _):
        await stop_for_good(process, waiting.ended.wait(), SERVER_NOTICES_WITHIN_S)
    await server.drain(0)


def add(server: grpc.aio.Server, handler: grpc.GenericRpcHandler) -> None:
    server.add_generic_rpc_handlers((handler,))


async def a_connection_says_nothing() -> None:
    server = await rpc.start_server("127.0.0.1", 0, lambda _: None, ())
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    async with asyncio.timeout(CHANNEL_NOTICES_WITHIN_S):
        await reader.read()
    writer.close()
    await server.drain(0)


async def main() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(a_server_vanishes())
        group.create_task(a_client_vanishes())
        group.create_task(a_connection_says_nothing())


if __name__ == "__main__":
    asyncio.run(main())
