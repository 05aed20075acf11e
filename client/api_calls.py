"""What the two clients share besides the session: their settings, new sessions, and the bookkeeping of a batch."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from client.api_access import Access, parsed_addresses
from client.api_params import Prompt, SamplingParams, generate_message
from client.api_results import BatchFailed, Completion
from client.api_session import Attempt, GenerationSession
from outrider.v1 import gateway_pb2, gateway_pb2_grpc
from shared.errors import InvalidRequest, OutriderError
from shared.tls import TlsConfig

DEFAULT_TIMEOUT_S = 600.0
# Called with (prompts done, prompts given) whenever one more is done.
Progress: TypeAlias = Callable[[int, int], None]


class ClientBase:
    """What an OutriderClient and an AsyncOutriderClient are given.

    address: host:port of a gateway's gRPC door, or several (a list, or with commas): the next one is asked when one is
    lost. api_key, tls: where the gateway asks for them. model: refuse gateways that serve another one. timeout_s: for
    a whole request, retries included; None has no end. stall_timeout_s: a stream that brings nothing for so long is
    taken up at the next gateway; None leaves that to the connection's keepalive, which notices a dead peer after 15 s.
    max_retries: how often every address is asked again before the first token. After it, a stream goes on as long as
    some gateway brings new tokens.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        api_key: str = "",
        tls: TlsConfig | None = None,
        model: str = "",
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        stall_timeout_s: float | None = None,
        max_retries: int = 2,
    ) -> None:
        self._addresses = parsed_addresses(address)
        self._access = Access(api_key, tls)
        self._model = model
        self._timeout_s = timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._max_retries = max_retries
        # One per address, made when it is first called.
        self._channels: dict[str, Any] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def _start(self, channel: Any, attempt: Attempt) -> Any:
        """The attempt's call, of the kind that the channel makes."""
        stub: Any = gateway_pb2_grpc.GatewayStub(channel)
        metadata, timeout_s = self._access.metadata, attempt.timeout_s
        if isinstance(attempt.message, gateway_pb2.ResumeRequest):
            return stub.Resume(attempt.message, metadata=metadata, timeout=timeout_s)
        return stub.Generate(attempt.message, metadata=metadata, timeout=timeout_s)

    def _check_open(self) -> None:
        if self._is_closed:
            raise OutriderError("the client is closed")

    def _session(self, prompt: Prompt, params: SamplingParams | None, timeout_s: float | None) -> GenerationSession:
        """timeout_s: None is the client's own."""
        message = generate_message(f"gen-{uuid.uuid4().hex}", prompt, params or SamplingParams(), self._model)
        return GenerationSession(
            message,
            self._addresses,
            max_retries=self._max_retries,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
        )


@dataclass
class Batch:
    """Prompts with their parameters, and what has come of them."""

    prompts: Sequence[Prompt]
    params: SamplingParams | Sequence[SamplingParams] | None
    max_concurrency: int
    progress: Progress | None

    def __post_init__(self) -> None:
        if self.max_concurrency < 1:
            raise InvalidRequest("max_concurrency must be at least 1", param="max_concurrency")
        if isinstance(self.params, Sequence) and len(self.params) != len(self.prompts):
            raise InvalidRequest(f"{len(self.prompts)} prompts, but {len(self.params)} params", param="params")
        self._completions: list[Completion | None] = [None] * len(self.prompts)
        self._failures: dict[int, OutriderError] = {}
        self._num_done = 0

    def job(self, index: int) -> tuple[Prompt, SamplingParams | None]:
        params = self.params[index] if isinstance(self.params, Sequence) else self.params
        return self.prompts[index], params

    def done(self, index: int, outcome: Completion | OutriderError) -> None:
        if isinstance(outcome, OutriderError):
            self._failures[index] = outcome
        else:
            self._completions[index] = outcome
        self._num_done += 1
        if self.progress is not None:
            self.progress(self._num_done, len(self.prompts))

    def result(self) -> list[Completion]:
        """In the order of the prompts. Raises BatchFailed when one failed."""
        if self._failures:
            raise BatchFailed(self._completions, self._failures)
        return [completion for completion in self._completions if completion is not None]
