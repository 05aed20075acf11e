"""Replies leave in order; a session's error is its last."""

from __future__ import annotations

from typing import Any

from outrider.engine.sampling.laws import LogitsProcessor
from outrider.shared.errors import InvalidRequest
from outrider.shared.messages import Commit, TokenOrigin
from outrider.shared.sampling_params import SamplingParams
from outrider.verifier_service.session import VerifierSession
from outrider.verifier_service.timing.reply_queue import ReplyQueue
from tests.verifier_service.engine_client import make_spec


def session_of(name: str, heard: list[tuple[str, Any]]) -> VerifierSession:
    params = SamplingParams(temperature=0.0)
    return VerifierSession(
        spec=make_spec([1], params),
        processor=LogitsProcessor(params, [1], ()),
        on_reply=lambda reply: heard.append((name, reply)),
        opened_at=0.0,
        token_ids=[1],
    )


def test_they_wait_and_leave_in_order_once() -> None:
    heard: list[tuple[str, Any]] = []
    queue, first, second = ReplyQueue(), session_of("first", heard), session_of("second", heard)
    commits = [Commit(1, base_len, (5,), (TokenOrigin.TARGET,)) for base_len in range(3)]
    queue.put(first, commits[0])
    queue.put(second, commits[1])
    queue.put(first, commits[2])
    assert heard == []
    queue.send()
    queue.send()
    assert heard == [("first", commits[0]), ("second", commits[1]), ("first", commits[2])]


def test_an_error_follows_what_was_committed_before_it() -> None:
    heard: list[tuple[str, Any]] = []
    queue, session = ReplyQueue(), session_of("one", heard)
    commit, error = Commit(1, 0, (5,), (TokenOrigin.TARGET,)), InvalidRequest("no")
    queue.put(session, commit)
    queue.fail(session, error)
    assert heard == [("one", commit), ("one", error)]
