"""What stands in Redis and was not written so: an InternalError, never another exception."""

from __future__ import annotations

import pytest

from outrider.gateway.request.commit_sink import commit_of
from outrider.gateway.request.record import RECORD_VERSION, SessionRecord
from outrider.shared.errors import InternalError
from outrider.shared.log.commit_log import LogEntry
from outrider.v1 import common_pb2 as common
from outrider.v1 import log_pb2 as pb


@pytest.mark.parametrize(
    "entry",
    [
        LogEntry(0, (5,), 0, extras=b"\xff"),
        LogEntry(0, (5,), 0, extras=pb.CommitExtras(origins=b"\x09").SerializeToString()),
        LogEntry(0, (5,), 77),
    ],
    ids=["bytes", "origin", "finish-reason"],
)
def test_an_entry(entry: LogEntry) -> None:
    with pytest.raises(InternalError, match="broken"):
        commit_of(entry)


def test_a_record_of_a_kind_that_there_is_not() -> None:
    prompt = pb.RecordedPrompt(mode=common.SPECULATION_MODE_EXACT, stream_keys=[1])
    record = pb.SessionRecord(version=RECORD_VERSION, kind=9, prompts=[prompt])
    with pytest.raises(InternalError, match="kind 9"):
        SessionRecord.decode(record.SerializeToString())
