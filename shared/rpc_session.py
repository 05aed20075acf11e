"""One bidirectional stream per session, and LoadDraft: what the drafter's and the verifier's servicers share.

The first message opens the session, each further one is a step. The end of the stream, for any reason, closes the
session. An error ends only its own stream, with its status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from outrider.shared import rpc
from outrider.shared.errors import InvalidRequest
from outrider.shared.messages import DraftMethodInfo

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")
ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True)
class SessionHandlers(Generic[RequestT, ResultT, ReplyT]):
    """The callbacks of a service for a session's stream.

    `open` takes the first message and a callback callable from any thread; it returns a handle.
    """

    open: Callable[[RequestT, Callable[[ResultT | Exception], None]], Awaitable[int]]
    step: Callable[[int, RequestT], None]
    close: Callable[[int], None]
    format: Callable[[ResultT], ReplyT]


async def session_stream(
    requests: AsyncIterator[RequestT], context: Any, handlers: SessionHandlers[RequestT, ResultT, ReplyT]
) -> AsyncIterator[ReplyT]:
    loop = asyncio.get_running_loop()
    replies: asyncio.Queue[ResultT | Exception | None] = asyncio.Queue()
    handle: int | None = None
    reader: asyncio.Task[None] | None = None
    try:
        first = await anext(requests, None)
        if first is None:
            raise InvalidRequest("the stream ended before a session was opened", param="open")
        handle = await handlers.open(first, lambda reply: _post(loop, replies, reply))
        reader = asyncio.create_task(_read(requests, handle, handlers, replies))
        while (reply := await replies.get()) is not None:
            if isinstance(reply, Exception):
                raise reply
            yield handlers.format(reply)
    except Exception as error:
        await rpc.abort(context, error)
    finally:
        if reader is not None:
            reader.cancel()
        if handle is not None:
            handlers.close(handle)


def _post(loop: asyncio.AbstractEventLoop, replies: asyncio.Queue[Any], reply: Any) -> None:
    # A reply that comes while the process ends has no reader.
    if not loop.is_closed():
        loop.call_soon_threadsafe(replies.put_nowait, reply)


async def _read(
    requests: AsyncIterator[RequestT],
    handle: int,
    handlers: SessionHandlers[RequestT, ResultT, ReplyT],
    replies: asyncio.Queue[ResultT | Exception | None],
) -> None:
    try:
        async for request in requests:
            handlers.step(handle, request)
        replies.put_nowait(None)
    except Exception as error:
        replies.put_nowait(error)


async def loaded_draft(load: Callable[[str], DraftMethodInfo] | None, path: str, context: Any) -> DraftMethodInfo:
    """Answers LoadDraft by `load`, which may take long; None: this service was not started so that it may."""
    try:
        if load is None:
            raise InvalidRequest("start the service with --allow-draft-loading to load drafts while it serves")
        return await asyncio.to_thread(load, path)
    except Exception as error:
        await rpc.abort(context, error)
