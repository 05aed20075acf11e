"""The asyncio client. Not here: what replies mean and when to retry (session.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from outrider.client.api.calls import Batch, ClientBase, Progress
from outrider.client.api.params import Prompt
from outrider.client.api.results import Completion, Update
from outrider.client.api.session import ENDED_EARLY, CallFailure, GenerationSession, stalled
from outrider.shared.errors import OutriderError
from outrider.shared.request_params import SamplingParams


class AsyncOutriderClient(ClientBase):
    """OutriderClient for one event loop. Close it, or use it as an asynchronous context manager."""

    async def __aenter__(self) -> AsyncOutriderClient:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels running streams."""
        self._is_closed = True
        for channel in self._channels.values():
            await channel.close()

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, timeout_s: float | None = None
    ) -> Completion:
        """The whole answer to a text, token ids or chat messages. Cancelling the task ends the request."""
        session = self._session(prompt, params, timeout_s)
        async with aclosing(self._updates(session)) as updates:
            async for _ in updates:
                pass
        return session.result()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Update, None]:
        """Updates as tokens are committed; the last one has the completion. To stop early, close the iterator."""
        return self._updates(self._session(prompt, params, timeout_s))

    async def batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_concurrency: int = 8,
        progress: Progress | None = None,
        timeout_s: float | None = None,
    ) -> list[Completion]:
        """Generates completions of all prompts, as OutriderClient.batch does."""
        batch = Batch(prompts, params, max_concurrency, progress)
        places = asyncio.Semaphore(max_concurrency)

        async def run(index: int) -> None:
            async with places:
                try:
                    prompt, own_params = batch.job(index)
                    outcome: Completion | OutriderError = await self.generate(prompt, own_params, timeout_s=timeout_s)
                except OutriderError as error:
                    outcome = error
            batch.done(index, outcome)

        async with asyncio.TaskGroup() as tasks:
            for index in range(len(prompts)):
                tasks.create_task(run(index))
        return batch.result()

    async def _updates(self, session: GenerationSession) -> AsyncGenerator[Update, None]:
        while not session.finished:
            attempt = session.next_attempt()
            await asyncio.sleep(attempt.pause_s)
            call = self._start(self._channel(attempt.address), attempt)
            try:
                while (reply := await self._reply(call)) is not grpc.aio.EOF:
                    update = session.receive(reply)
                    yield update
                    if update.completion is not None:
                        return
                failure = ENDED_EARLY
            except TimeoutError:
                failure = stalled(self._stall_timeout_s or 0.0)
            except grpc.RpcError as error:
                failure = CallFailure.of(error)
            finally:
                call.cancel()
            session.failed(failure)

    async def _reply(self, call: Any) -> Any:
        """The next reply, or grpc.aio.EOF. Raises TimeoutError after `stall_timeout_s` without one."""
        async with asyncio.timeout(self._stall_timeout_s):
            return await call.read()

    def _channel(self, address: str) -> grpc.aio.Channel:
        self._check_open()
        if address not in self._channels:
            self._channels[address] = self._access.aio_channel(address)
        channel: grpc.aio.Channel = self._channels[address]
        return channel
