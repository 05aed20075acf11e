"""vLLM's AsyncLLM: requests one by one, each an async generator of its output as it comes.

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="models/demo-target"))
    async for output in engine.generate("def main():", SamplingParams(max_tokens=64), "request-1"):
        print(output.outputs[0].text)
    engine.shutdown()

Runs on the event loop of whoever asks; an engine serves one loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from outrider.offline.generation import OfflineGeneration
from outrider.offline.offline_engine import OfflineEngine
from outrider.offline.outputs import Gathering, RequestOutput
from outrider.offline.prompts import PreparedPrompt, Prompt
from outrider.shared.errors import InvalidRequest
from outrider.shared.request_params import RequestOutputKind, SamplingParams


class AsyncEngineArgs(SimpleNamespace):
    """The arguments of AsyncLLM, by name: those of LLM."""

    def __init__(self, model: str | Path, **arguments: Any) -> None:
        super().__init__(model=model, **arguments)


class AsyncLLM(OfflineEngine):
    """A target and its draft methods for requests that come and go; `shutdown` it in the end."""

    _streams: dict[str, _Stream | None]

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> Self:
        return cls(**vars(engine_args))

    def _hold(self, *parts: Any) -> None:
        super()._hold(*parts)
        self._streams = {}

    async def generate(
        self, prompt: object, sampling_params: SamplingParams | None, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields what `sampling_params.output_kind` says; the last output is `finished`.

        prompt: text, {"prompt": text} or {"prompt_token_ids": [...]}. A consumer that is slower than the model gets
        fewer and longer outputs. Closing the generator frees the request. Raises InvalidRequest that names the field,
        also when a running request has the same id.
        """
        self._check_open()
        if request_id in self._streams:
            raise InvalidRequest(f"request_id {request_id!r} is in use", param="request_id")
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        stream: _Stream | None = None
        self._streams[request_id] = stream
        try:
            # A long prompt is tokenized on a thread, so that others' outputs go on.
            prepared = await asyncio.to_thread(
                self._preparation.prepare, self._preparation.next_number(), Prompt(prompt), params, request_id
            )
            self._check_open()
            self._streams[request_id] = stream = _Stream(self._generation, prepared, params.output_kind)
            finished = False
            while not finished:
                output = await stream.next()
                finished = output.finished
                yield output
        finally:
            del self._streams[request_id]
            if stream is not None:
                await stream.close()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends running requests: their last output has `finish_reason` "abort". Others are not looked for."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            stream = self._streams.get(one)
            if stream is not None:
                stream.cancel()

    def shutdown(self) -> None:
        """Aborts what runs and frees the models; to be called on the event loop, or once it has ended."""
        for stream in self._streams.values():
            if stream is not None:
                stream.cancel()
        self.close()


class _Stream:
    """One running request: gathers its updates, and makes one output of those since the last was taken."""

    def __init__(self, generation: OfflineGeneration, prepared: PreparedPrompt, kind: RequestOutputKind) -> None:
        self._generation = generation
        self._request = prepared.request
        self._gathering = Gathering(prepared.request, prepared.text, generation.tokenizer)
        self._kind = kind
        self._started = time.perf_counter()
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._task = asyncio.create_task(self._run(), name=f"request-{prepared.request.request_id}")

    async def next(self) -> RequestOutput:
        """Waits for something new. Raises the request's error."""
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        return self._gathering.output(self._elapsed_s(), delta=self._kind is RequestOutputKind.DELTA)

    def cancel(self) -> None:
        """Ends the request, whose last output says so."""
        self._task.cancel()

    async def close(self) -> None:
        """Frees the request's session."""
        if not self._gathering.finished:
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            async with aclosing(self._generation.generate(self._request)) as updates:
                async for update in updates:
                    self._gathering.add(update, self._elapsed_s())
                    if self._kind is not RequestOutputKind.FINAL_ONLY:
                        self._changed.set()
        except Exception as error:
            self._error = error
        finally:
            self._gathering.abort()  # of what has not finished
            self._changed.set()

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started
