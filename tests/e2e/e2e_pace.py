"""A relay before Redis that takes a hundredth of a second for each reply: no stream is faster, on any machine.

Nothing is told before it is committed, and a session decodes few rounds ahead of that; so a test that is to disturb a
stream in its midst has the time for it. The relay runs in the test's own process: who is held up holds both up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PAUSE_S = 0.01
# Arguments of a gateway: rounds that a session may be ahead of what is committed.
FEW_AHEAD = ("--max-queued-commits", "8")


@contextmanager
def paced(redis_port: int, pause_s: float = PAUSE_S) -> Iterator[str]:
    """The relay's own redis:// address; what becomes of Redis behind it, its clients see as they would."""
    loop = asyncio.new_event_loop()
    relay = _Relay(redis_port, pause_s)
    thread = threading.Thread(target=loop.run_forever, name="paced-redis")
    thread.start()
    try:
        port = asyncio.run_coroutine_threadsafe(relay.start(), loop).result(30)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        asyncio.run_coroutine_threadsafe(relay.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Relay:
    def __init__(self, redis_port: int, pause_s: float) -> None:
        self._redis_port = redis_port
        self._pause_s = pause_s
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._relay(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            with suppress(OSError):
                replies, requests = await asyncio.open_connection("127.0.0.1", self._redis_port)
                writers.append(requests)
                ways = [_pump(reader, requests, 0.0), _pump(replies, writer, self._pause_s)]
                tasks = [asyncio.create_task(way) for way in ways]
                try:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for one in writers:
                one.close()
            for one in writers:
                with suppress(OSError):
                    await one.wait_closed()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause_s: float) -> None:
    """Until either side ends."""
    while data := await reader.read(1 << 20):
        await asyncio.sleep(pause_s)
        writer.write(data)
        await writer.drain()
