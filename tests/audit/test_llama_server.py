"""What llama.cpp's server does without being wrong in it: an audit must not call that broken."""

from __future__ import annotations

import json
import re
from collections import Counter

from outrider.client.audit.run import run_audit
from outrider.client.audit.session import PROMPTS, Options
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


class IdsInLists(FakeServer):
    """Names the ids of an answer in its logprobs alone."""

    def respond(self, path: str, content: bytes) -> tuple[int, str, bytes]:
        status, kind, data = super().respond(path, content)
        return status, kind, re.sub(rb', "token_ids": \[[^]]*\]', b"", data)


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


def test_fields_are_tested_where_only_the_lists_name_ids() -> None:
    for defect, wanted in (("", Verdict.PASS), ("min_tokens", Verdict.FAIL)):
        found = verdicts(audited(IdsInLists(defect), "fields"), "fields")
        assert found["fields: logit_bias of 100 and -100"] is Verdict.PASS
        assert found["fields: min_tokens with stop_token_ids"] is wanted


class EndlessAnswers(FakeServer):
    """With ignore_eos the end's token cannot be drawn; the lists are the model's own, with it."""

    end = 0

    def respond(self, path: str, content: bytes) -> tuple[int, str, bytes]:
        body = json.loads(content) if content else {}
        if body.get("ignore_eos"):
            body["logit_bias"] = {**(body.get("logit_bias") or {}), str(self.end): -100}
        return super().respond(path, json.dumps(body).encode())


def test_an_end_that_cannot_be_drawn_rules_no_token_out() -> None:
    server = EndlessAnswers()
    asked = {"prompt": PROMPTS[0], "max_tokens": 48, "temperature": 0}
    _, _, data = server.respond("/v1/completions", json.dumps(asked).encode())
    server.end = Counter(json.loads(data)["choices"][0]["token_ids"]).most_common(1)[0][0]
    report = audited(server, "law")
    told = {finding.test: finding.evidence for finding in report.findings}
    for test in ("law: top_p = 0.7", "law: top_k = 5"):
        assert "rules out" not in told[test], told[test]
