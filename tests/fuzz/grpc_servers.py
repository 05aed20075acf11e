"""Every RPC of the gateway, the verifier and the drafter, with raw bytes: strange messages and broken ones.

A call must end with a status that the documentation knows (shared/errors.py), or go on serving; UNKNOWN and INTERNAL
are bugs, and so is an answer that does not come.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from hypothesis import strategies as st

from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as drafter
from outrider.v1 import gateway_pb2 as gateway
from outrider.v1 import verifier_pb2 as verifier
from tests.fuzz.campaign import Target
from tests.fuzz.strange_bytes import corrupted
from tests.fuzz.strange_protobuf import around, strange
from tests.fuzz.tally import Finding
from tests.fuzz.victim import Victim

_CODE = grpc.StatusCode
EXPECTED = frozenset(
    {
        *(_CODE.OK, _CODE.INVALID_ARGUMENT, _CODE.NOT_FOUND, _CODE.FAILED_PRECONDITION, _CODE.RESOURCE_EXHAUSTED),
        *(_CODE.ABORTED, _CODE.UNAVAILABLE, _CODE.UNAUTHENTICATED),
    }
)
# Long after any answer; a call that has not ended then hangs (DEADLINE_EXCEEDED, which is not expected).
HANG_S = 60.0
# A session that has nothing more to say is ended by the client.
_QUIET_S = 0.05
_MOST_REPLIES = 3
# One input is so many calls at once: they meet in the same batch of the engine.
AT_ONCE = 8

_STREAMS = ("Generate", "Resume", "Health/Watch")
_HEALTH = health_pb2.HealthCheckRequest

_GREEDY = common.SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
_SAMPLED = common.SamplingParams(temperature=0.8, max_tokens=32, seed=7, top_p=0.9)
_EXACT, _REJECTION = common.SPECULATION_MODE_EXACT, common.SPECULATION_MODE_REJECTION
_PROMPT = [40, 41, 42, 43]
_LAW = common.SparseLaw(token_ids=[5, 6], counts=[65535, 1])
_ROWS = common.HiddenStates(layers=[1], num_rows=1, width=4, dtype="float32", data=bytes(16))
_MASKED = common.SamplingParams(
    temperature=0, max_tokens=8, grammar=common.Grammar(kind=common.Grammar.KIND_REGEX, text="[a-z]+")
)


def _verifier_opens() -> list[verifier.VerifierRequest]:
    return [
        verifier.VerifierRequest(
            open=verifier.OpenVerifierSession(
                session_id="raw", prompt_token_ids=_PROMPT, sampling_params=params, mode=mode
            )
        )
        for params, mode in ((_GREEDY, _EXACT), (_SAMPLED, _REJECTION), (_MASKED, _EXACT))
    ]


def _verifier_steps() -> list[verifier.VerifierRequest]:
    tree = common.Proposal(token_ids=[5, 6, 7], parents=[-1, -1, 0], method="fuzz")
    lawful = common.Proposal(token_ids=[5, 6], laws=[_LAW, _LAW], law_total=65536, method="fuzz")
    wanted = verifier.HiddenStatesRequest(layers=[1], first_index=-2)
    return [
        verifier.VerifierRequest(step=step)
        for step in (
            verifier.VerifyStep(max_new_tokens=2, hidden_states=wanted),
            verifier.VerifyStep(proposal=tree),
            verifier.VerifyStep(proposal=lawful),
        )
    ]


def _drafter_opens() -> list[drafter.DrafterRequest]:
    return [
        drafter.DrafterRequest(
            open=drafter.OpenDrafterSession(
                session_id="raw", method=method, prompt_token_ids=_PROMPT, sampling_params=params, mode=mode
            )
        )
        for method, params, mode in (
            ("draft_model", _GREEDY, _EXACT),
            ("draft_model", _SAMPLED, _REJECTION),
            ("ngram", _GREEDY, _EXACT),
        )
    ]


def _drafter_steps() -> list[drafter.DrafterRequest]:
    return [
        drafter.DrafterRequest(step=step)
        for step in (
            drafter.DraftStep(committed_token_ids=[44], num_draft_tokens=3),
            drafter.DraftStep(num_draft_tokens=3, max_tree_nodes=6, max_branches=2),
            drafter.DraftStep(num_draft_tokens=2, hidden_states=[_ROWS]),
        )
    ]


def _generates() -> list[gateway.GenerateRequest]:
    speculation = common.Speculation(method="draft_model", num_speculative_tokens=3, mode=_EXACT)
    chat = gateway.ChatMessages(messages=[gateway.ChatMessage(role="user", content="a")])
    return [
        gateway.GenerateRequest(prompt="import os", sampling_params=_GREEDY, speculation=speculation),
        gateway.GenerateRequest(messages=chat, sampling_params=_SAMPLED, stop=["\n"]),
        gateway.GenerateRequest(prompt_token_ids=common.TokenSequence(token_ids=_PROMPT), sampling_params=_MASKED),
    ]


def _bytes_of(kind: type[Message], good: Sequence[Message]) -> st.SearchStrategy[bytes]:
    """Mostly near what is right, as that gets furthest; then anything; then broken bytes."""
    near = st.sampled_from(good).flatmap(around).map(_serialised)
    return st.one_of(near, near, strange(kind).map(_serialised), corrupted(near), st.binary(max_size=40))


def _serialised(message: Message) -> bytes:
    return message.SerializeToString()


@contextmanager
def grpc_targets(victim: Victim) -> Iterator[list[Target[Any]]]:
    state = victim.state
    addresses = {"Gateway": state.grpc_address, "Verifier": state.verifiers[0], "Drafter": state.drafters[0]}
    with ExitStack() as stack:
        channels = {name: stack.enter_context(grpc.insecure_channel(address)) for name, address in addresses.items()}
        servers = _GrpcServers(victim, channels, stack.enter_context(ThreadPoolExecutor(AT_ONCE)))
        yield servers.targets()


# grpc.aio's client says INTERNAL by itself when a stream ends while it writes; the threaded one says what it was told.
_Call = Callable[[grpc.Channel, str, list[bytes]], tuple[grpc.StatusCode, str]]


class _GrpcServers:
    def __init__(self, victim: Victim, channels: Mapping[str, grpc.Channel], pool: ThreadPoolExecutor) -> None:
        self._victim = victim
        self._channels = channels
        self._pool = pool

    def targets(self) -> list[Target[Any]]:
        return [
            self._sessions("Verifier", verifier.VerifierRequest, _verifier_opens(), _verifier_steps()),
            self._sessions("Drafter", drafter.DrafterRequest, _drafter_opens(), _drafter_steps()),
            self._calls("Gateway", "Generate", gateway.GenerateRequest, _generates()),
            self._calls("Gateway", "Resume", gateway.ResumeRequest, [gateway.ResumeRequest(request_id="x")]),
            self._calls("Gateway", "GetModel", gateway.GetModelRequest, [gateway.GetModelRequest()]),
            self._calls("Verifier", "GetInfo", verifier.GetVerifierInfoRequest, [verifier.GetVerifierInfoRequest()]),
            self._calls("Drafter", "GetInfo", drafter.GetDrafterInfoRequest, [drafter.GetDrafterInfoRequest()]),
            *(self._calls(service, "Health/Check", _HEALTH, [_HEALTH(service="x")]) for service in self._channels),
            *(self._calls(service, "Health/Watch", _HEALTH, [_HEALTH(service="x")]) for service in self._channels),
        ]

    def _sessions(
        self, service: str, kind: type[Message], opens: Sequence[Message], steps: Sequence[Message]
    ) -> Target[Any]:
        """The first message opens a session, the others are steps; now and then one in the other's place."""
        good = st.sampled_from(opens).map(_serialised)
        step = _bytes_of(kind, steps)
        one = st.tuples(good | _bytes_of(kind, opens), st.lists(step, max_size=3)).map(lambda two: [two[0], *two[1]])
        return self._target(service, "Session", one, _session)

    def _calls(self, service: str, method: str, kind: type[Message], good: Sequence[Message]) -> Target[Any]:
        one = _bytes_of(kind, good).map(lambda only: [only])
        return self._target(service, method, one, _stream if method in _STREAMS else _unary)

    def _target(self, service: str, method: str, one: st.SearchStrategy[list[bytes]], call: _Call) -> Target[Any]:
        channel = self._channels[service]
        path = f"/grpc.health.v1.{method}" if method.startswith("Health/") else f"/outrider.v1.{service}/{method}"

        def check(calls: list[list[bytes]]) -> list[str]:
            endings = self._pool.map(lambda messages: call(channel, path, messages), calls)
            return [_outcome(code, details) for code, details in endings]

        inputs = st.lists(one, min_size=AT_ONCE, max_size=AT_ONCE)
        return Target(f"gRPC {service}.{method}", inputs, check, AT_ONCE, self._victim.check)


def _outcome(code: grpc.StatusCode, details: str) -> str:
    if code not in EXPECTED:
        raise Finding(f"{code.name}: {details}")
    return str(code.name)


def _unary(channel: grpc.Channel, path: str, messages: list[bytes]) -> tuple[grpc.StatusCode, str]:
    method: Any = channel.unary_unary(path)
    return _ending(method.future(messages[0], timeout=HANG_S))


def _stream(channel: grpc.Channel, path: str, messages: list[bytes]) -> tuple[grpc.StatusCode, str]:
    """Reads a few replies; a call that goes on after them is well."""
    method: Any = channel.unary_stream(path)
    call = method(messages[0], timeout=HANG_S)
    most = 1 if path.endswith("Watch") else _MOST_REPLIES  # it says how things stand, then waits
    with suppress(grpc.RpcError):
        if len(list(itertools.islice(call, most))) == most:
            call.cancel()
            return grpc.StatusCode.OK, ""
    return _ending(call)


def _session(channel: grpc.Channel, path: str, messages: list[bytes]) -> tuple[grpc.StatusCode, str]:
    """All messages; when no reply comes any more the stream is ended, and the server with it."""
    heard = queue.SimpleQueue[bool]()

    def requests() -> Iterator[bytes]:
        yield from messages
        with suppress(queue.Empty):
            while heard.get(timeout=_QUIET_S):
                pass

    method: Any = channel.stream_stream(path)
    call = method(requests(), timeout=HANG_S)
    with suppress(grpc.RpcError):
        for _ in call:
            heard.put(True)
    heard.put(False)
    return _ending(call)


def _ending(call: Any) -> tuple[grpc.StatusCode, str]:
    return call.code(), call.details()
