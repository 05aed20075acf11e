"""The blocking client. Not here: what replies mean and when to retry (session.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import grpc

from outrider.client.api.calls import Batch, ClientBase, Progress
from outrider.client.api.params import Prompt
from outrider.client.api.results import Completion, Update
from outrider.client.api.session import ENDED_EARLY, CallFailure, GenerationSession, stalled
from outrider.shared.errors import OutriderError
from outrider.shared.request_params import SamplingParams
from outrider.v1 import gateway_pb2


class OutriderClient(ClientBase):
    """A client of a gateway's gRPC server, safe to share between threads. Close it, or use it as a context manager.

    All methods raise OutriderError (shared/errors.py): InvalidRequest, Unauthenticated, Overloaded, DeadlineExceeded,
    Unavailable and others, with `retry_after_s` where the server gave one.
    """

    def __enter__(self) -> OutriderClient:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels running streams."""
        with self._lock:
            self._is_closed = True
            for channel in self._channels.values():
                channel.close()

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, timeout_s: float | None = None
    ) -> Completion:
        """The whole answer to a text, token ids or chat messages."""
        session = self._session(prompt, params, timeout_s)
        for _ in self._updates(session):
            pass
        return session.result()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, timeout_s: float | None = None
    ) -> Generator[Update, None, None]:
        """Updates as tokens are committed; the last one has the completion. To stop early, close the iterator."""
        return self._updates(self._session(prompt, params, timeout_s))

    def batch(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_concurrency: int = 8,
        progress: Progress | None = None,
        timeout_s: float | None = None,
    ) -> list[Completion]:
        """Completions in the order of the prompts, at most `max_concurrency` at a time.

        params: one for all, or one per prompt. timeout_s: per prompt. progress: called in this thread. Raises
        BatchFailed once all prompts have ended; it holds the completions that succeeded.
        """
        batch = Batch(prompts, params, max_concurrency, progress)

        def run(index: int) -> Completion | OutriderError:
            try:
                prompt, own_params = batch.job(index)
                return self.generate(prompt, own_params, timeout_s=timeout_s)
            except OutriderError as error:
                return error

        pool = ThreadPoolExecutor(max_concurrency, thread_name_prefix="outrider-batch")
        try:
            runs = {pool.submit(run, index): index for index in range(len(prompts))}
            for future in as_completed(runs):
                batch.done(runs[future], future.result())
        except BaseException:  # Ctrl-C: cancel what runs, or the pool would wait for it
            self.close()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return batch.result()

    def _updates(self, session: GenerationSession) -> Generator[Update, None, None]:
        while not session.finished:
            attempt = session.next_attempt()
            time.sleep(attempt.pause_s)
            call = self._start(self._channel(attempt.address), attempt)
            try:
                for reply in _replies(call, self._stall_timeout_s):
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

    def _channel(self, address: str) -> grpc.Channel:
        with self._lock:
            self._check_open()
            if address not in self._channels:
                self._channels[address] = self._access.channel(address)
            channel: grpc.Channel = self._channels[address]
            return channel


def _replies(call: Any, stall_timeout_s: float | None) -> Iterator[gateway_pb2.GenerateReply]:
    """Yields the call's replies. Raises TimeoutError after stall_timeout_s without one.

    A timer cancels the call, as blocking reads cannot time out.
    """
    if stall_timeout_s is None:
        yield from call
        return
    is_stalled = threading.Event()  # per call: the timer may fire just after its message arrived

    def cut() -> None:
        is_stalled.set()
        call.cancel()

    while True:
        timer = threading.Timer(stall_timeout_s, cut)
        timer.daemon = True
        timer.start()
        try:
            reply = next(call)
        except StopIteration:
            return
        except grpc.RpcError:
            if is_stalled.is_set():
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()
        yield reply
