"""Messages that fuzzing has found to end in something else than a refusal."""

from __future__ import annotations

import pytest

from outrider.shared import wire
from outrider.shared.errors import InvalidRequest
from outrider.v1 import common_pb2, verifier_pb2

Kind = common_pb2.Grammar


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Kind.KIND_CHOICE, "true"),
        (Kind.KIND_CHOICE, "3"),
        (Kind.KIND_CHOICE, "{}"),
        (Kind.KIND_CHOICE, "[]"),
        (Kind.KIND_CHOICE, '["a", 1]'),
        (Kind.KIND_CHOICE, '[""]'),
        (Kind.KIND_CHOICE, "[" * 100_000),
        (Kind.KIND_JSON_SCHEMA, "{"),
        (Kind.KIND_JSON_SCHEMA, "[" * 100_000),
        (99, "a"),
    ],
)
def test_a_grammar_whose_text_is_none(kind: Kind.Kind.ValueType, text: str) -> None:
    message = common_pb2.SamplingParams(grammar=Kind(kind=kind, text=text))
    with pytest.raises(InvalidRequest, match="grammar"):
        wire.params_from_wire(message)


@pytest.mark.parametrize("commit", [verifier_pb2.Commit(origins=[9]), verifier_pb2.Commit(finish_reason=9)])
def test_a_commit_with_a_number_that_stands_for_nothing(commit: verifier_pb2.Commit) -> None:
    with pytest.raises(InvalidRequest, match="commit"):
        wire.commit_from_wire(commit)
