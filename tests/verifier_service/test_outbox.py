"""Replies leave in order; a session's error is its last."""

from __future__ import annotations

from typing import Any

from engine.sampling import LogitsProcessor
from shared.errors import InvalidRequest
from shared.messages import Commit, TokenOrigin
from shared.sampling_params import SamplingParams
from tests.verifier_service.engine_client import make_spec
from verifier_service.outbox import Outbox
from verifier_service.session import VerifierSession


def session_of(name: str, heard: list[tuple[str, Any]]) -> VerifierSession:
    params = SamplingParams(temperature=0.0)
    return VerifierSession(
        spec=make_spec([1], params),
        processor=LogitsProcessor(params, [1], ()),
        stop_ids=frozenset(),
        on_reply=lambda reply: heard.append((name, reply)),
        opened_at=0.0,
        token_ids=[1],
    )


def test_they_wait_and_leave_in_order_once() -> None:
    heard: list[tuple[str, Any]] = []
    outbox, first, second = Outbox(), session_of("first", heard), session_of("second", heard)
    commits = [Commit(1, base_len, (5,), (TokenOrigin.TARGET,)) for base_len in range(3)]
    outbox.put(first, commits[0])
    outbox.put(second, commits[1])
    outbox.put(first, commits[2])
    assert heard == []
    outbox.send()
    outbox.send()
    assert heard == [("first", commits[0]), ("second", commits[1]), ("first", commits[2])]


def test_an_error_follows_what_was_committed_before_it() -> None:
    heard: list[tuple[str, Any]] = []
    outbox, session = Outbox(), session_of("one", heard)
    commit, error = Commit(1, 0, (5,), (TokenOrigin.TARGET,)), InvalidRequest("no")
    outbox.put(session, commit)
    outbox.fail(session, error)
    assert heard == [("one", commit), ("one", error)]
