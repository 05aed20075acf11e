"""What llama.cpp's server does without being wrong in it: an audit must not call that broken."""

from __future__ import annotations

import json

from outrider.client.audit.run import run_audit
from outrider.client.audit.session import Options
from outrider.client.audit.verdicts import Report, Verdict
from outrider.client.audit.wire import Server
from tests.audit.fake_server import FakeServer


class SilentStreams(FakeServer):
    """Every other event of a stream has its text, but neither ids nor logprobs."""

    def respond(self, path: str, content: bytes) -> tuple[int, str, bytes]:
        status, kind, data = super().respond(path, content)
        if kind == "text/event-stream":
            events = data.split(b"\n\n")
            data = b"\n\n".join(_without_ids(event) if place % 2 else event for place, event in enumerate(events))
        return status, kind, data


def _without_ids(event: bytes) -> bytes:
    if not event.startswith(b"data: {"):
        return event
    body = json.loads(event.removeprefix(b"data: "))
    for choice in body["choices"]:
        choice.pop("token_ids", None)
        choice["logprobs"] = None
    return b"data: " + json.dumps(body).encode()


class UnknownFields(FakeServer):
    """Takes these fields, and passes over them."""

    def respond(self, path: str, content: bytes) -> tuple[int, str, bytes]:
        body = json.loads(content) if content else {}
        known = {name: value for name, value in body.items() if name not in ("min_tokens", "stop_token_ids")}
        return super().respond(path, json.dumps(known).encode())


def audited(server: FakeServer, *tests: str) -> Report:
    options = Options(tokens=500, only=frozenset(tests))
    return run_audit(Server("http://fake", transport=server.transport), options)


def verdicts(report: Report, kind: str) -> dict[str, Verdict]:
    return {finding.test: finding.verdict for finding in report.findings if finding.test.startswith(kind)}


def test_streams_with_the_same_text_and_fewer_ids_are_the_same() -> None:
    found = verdicts(audited(SilentStreams(), "logprobs", "greedy"), "greedy")
    assert found["greedy: after others"] is Verdict.PASS
    assert Verdict.FAIL not in found.values()


def test_stop_tokens_that_have_no_effect_are_not_tested() -> None:
    found = verdicts(audited(UnknownFields(), "fields"), "fields")
    assert found["fields: min_tokens with stop_token_ids"] is Verdict.NOT_TESTED
    assert Verdict.FAIL not in found.values()


def test_stop_tokens_that_have_an_effect_are_tested() -> None:
    found = verdicts(audited(FakeServer("min_tokens"), "fields"), "fields")
    assert found["fields: min_tokens with stop_token_ids"] is Verdict.FAIL
