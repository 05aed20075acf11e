"""The connection to one drafter: a thread that connects, reads answers, and connects again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc

from outrider.plugins import wire
from outrider.plugins.options import Options

# seconds; one attempt to connect, the time between two, and that after a loss for slowness or a refusal, doubled up to
# the longest while it repeats
_CONNECT_S, _RETRY_S, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 0.5, 0.25, 8.0
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 4 * 2**20),  # drafts are short; more is no drafter's answer
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),  # an attempt after a pause must not wait for gRPC's own backoff
)
_REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
)


class Link:
    """No method waits. generation counts connections: what was opened at an earlier one is gone.

    on_answers is called on the link's thread.
    """

    def __init__(
        self,
        address: str,
        options: Options,
        engine: Any,
        on_answers: Callable[[Link, Any], None],
        log: logging.Logger,
    ) -> None:
        self.address = address
        self.generation = 0
        self.is_up = False
        self._options, self._engine, self._on_answers, self._log = options, engine, on_answers, log
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._call: Any = None
        self._pause_s = _FIRST_PAUSE_S
        self._is_paused = False
        self._told = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"outrider-{address}", daemon=True)
        self._thread.start()

    def send(self, items: list[dict[str, Any]]) -> None:
        """Sends the items of a request, as keyword arguments of theirs; nothing while the link is down."""
        if self.is_up:
            self._requests.put(wire.DraftBatchRequest(items=items))

    def lose(self, why: str) -> None:
        """Gives up a drafter that does not answer; it is tried again after a pause."""
        call, self.is_up, self._is_paused = self._call, False, True
        self._tell(why)
        if call is not None:
            call.cancel()

    def answered_in_time(self) -> None:
        self._pause_s = _FIRST_PAUSE_S

    def close(self) -> None:
        self._closed.set()
        if self._call is not None:
            self._call.cancel()
        self._thread.join()

    # ---- the link's thread ----

    def _run(self) -> None:
        wait_s = 0.0
        while not self._closed.wait(wait_s):
            self._is_paused = False
            try:
                with self._channel() as channel:
                    grpc.channel_ready_future(channel).result(timeout=_CONNECT_S)
                    self._serve(channel)
            except grpc.FutureTimeoutError:
                self._tell("it cannot be reached")
            except grpc.RpcError as error:
                if not self._is_paused and not self._closed.is_set():
                    self._is_paused = error.code() in _REFUSALS
                    self._tell(f"{error.code().name}: {error.details()}")
            except Exception as error:  # a file of keys, a broken answer: the engine goes on without drafts
                self._is_paused = True
                self._tell(repr(error))
            self.is_up = False
            wait_s = self._pause_s if self._is_paused else _RETRY_S
            self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s) if self._is_paused else self._pause_s

    def _channel(self) -> Any:
        if not self._options.tls_ca_file:
            return grpc.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
        files = (self._options.tls_ca_file, self._options.tls_key_file, self._options.tls_cert_file)
        credentials = grpc.ssl_channel_credentials(*(Path(name).read_bytes() if name else None for name in files))
        return grpc.secure_channel(self.address, credentials, options=_CHANNEL_OPTIONS)

    def _serve(self, channel: Any) -> None:
        requests: SimpleQueue[Any] = SimpleQueue()
        requests.put(wire.DraftBatchRequest(engine=self._engine))
        batch = channel.stream_stream(
            wire.BATCH,
            request_serializer=wire.DraftBatchRequest.SerializeToString,
            response_deserializer=wire.DraftBatchReply.FromString,
        )
        try:
            self._call = batch(iter(requests.get, None), metadata=self._options.metadata())
            for reply in self._call:
                if self.is_up:
                    self._on_answers(self, reply.answers)
                elif not self._is_paused:  # the first, empty: the drafter takes this engine
                    self._requests, self.generation, self.is_up = requests, self.generation + 1, True
                    self._told = ""
                    self._log.info("Outrider's drafter %s is there", self.address)
            self._tell("it has ended the stream")
        finally:
            self.is_up = False
            requests.put(None)
            self._call = None

    def _tell(self, why: str) -> None:
        """Logs each reason once in a row: a drafter may be away for long."""
        if why != self._told:
            self._told = why
            self._log.warning("no drafts from Outrider's drafter %s: %s", self.address, why)
