"""Code that both clients share besides the session: settings, new sessions, and batch bookkeeping."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from outrider.client.api.access import Access, parsed_addresses
from outrider.client.api.params import Prompt, generate_message
from outrider.client.api.results import BatchFailed, Completion
from outrider.client.api.session import Attempt, GenerationSession
from outrider.shared.errors import InvalidRequest, OutriderError
from outrider.shared.request_params import SamplingParams
from outrider.shared.tls import TlsConfig
from outrider.v1 import gateway_pb2, gateway_pb2_grpc

DEFAULT_TIMEOUT_S = 600.0
# Called with (prompts done, prompts in total) after each prompt.
Progress: TypeAlias = Callable[[int, int], None]


class ClientBase:
    """Settings of OutriderClient and AsyncOutriderClient.

    address: host:port of a gateway's gRPC server; several as a list or comma-separated: if one is lost, the next is
    tried. api_key, tls: where the gateway requires them. model: refuse gateways that serve another one. timeout_s: per
    request, retries included; None is unlimited. stall_timeout_s: a stream silent for this long resumes at the next
    gateway; None relies on the connection's keepalive, which detects a dead peer after 15 s. max_retries: retries of
    each address before the first token. After it, a stream continues as long as some gateway delivers new tokens.
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
        # One per address, opened on first use.
        self._channels: dict[str, Any] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def _start(self, channel: Any, attempt: Attempt) -> Any:
        """Starts the attempt's call on either kind of channel."""
        stub: Any = gateway_pb2_grpc.GatewayStub(channel)
        metadata, timeout_s = self._access.metadata, attempt.timeout_s
        if isinstance(attempt.message, gateway_pb2.ResumeRequest):
            return stub.Resume(attempt.message, metadata=metadata, timeout=timeout_s)
        return stub.Generate(attempt.message, metadata=metadata, timeout=timeout_s)

    def _check_open(self) -> None:
        if self._is_closed:
            raise OutriderError("the client is closed")

    def _session(self, prompt: Prompt, params: SamplingParams | None, timeout_s: float | None) -> GenerationSession:
        """Makes a session for a prompt. timeout_s None: the client's default."""
        message = generate_message(f"gen-{uuid.uuid4().hex}", prompt, params or SamplingParams(), self._model)
        return GenerationSession(
            message,
            self._addresses,
            max_retries=self._max_retries,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
        )


@dataclass
class Batch:
    """Prompts, their parameters, and their outcomes so far."""

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
        """Completions in the order of the prompts. Raises BatchFailed when one failed."""
        if self._failures:
            raise BatchFailed(self._completions, self._failures)
        return [completion for completion in self._completions if completion is not None]
