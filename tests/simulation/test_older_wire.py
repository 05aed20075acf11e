"""The older version's view of messages: real fields are gone, what it knows stays byte for byte."""

from __future__ import annotations

from outrider.v1 import verifier_pb2 as pb
from tests.simulation.older_wire import clipped


def test_fields_that_came_later_are_gone() -> None:
    commit = pb.Commit(epoch=3, base_len=7, token_ids=[1, 2], next_draft=pb.NextDraft(method="ngram"), saved_us=-5)
    known = pb.Commit.FromString(clipped("outrider.v1.Commit", commit.SerializeToString()))
    assert known == pb.Commit(epoch=3, base_len=7, token_ids=[1, 2])


def test_fields_are_gone_within_messages_too() -> None:
    request = pb.VerifierRequest(step=pb.VerifyStep(base_len=7, auto_drafts=pb.AutoDrafts(max_num_draft_tokens=4)))
    known = pb.VerifierRequest.FromString(clipped("outrider.v1.VerifierRequest", request.SerializeToString()))
    assert known == pb.VerifierRequest(step=pb.VerifyStep(base_len=7))


def test_other_packages_have_one_version() -> None:
    assert clipped("grpc.health.v1.HealthCheckRequest", b"\n\x01a") == b"\n\x01a"
