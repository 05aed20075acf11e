"""The wire as an older version knows it: what such a process reads and writes lacks the fields that have come since.

older_wire.binpb has the real descriptors of 26 November 2026, before requests' speculation, `auto` at the verifier and
receipts had fields of their own. What the older process does with the rest is today's code: that it takes an absent
field as what the older version did is checked, not that version's own faults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from outrider.gateway.request import commit_sink
from outrider.gateway.request.record import SessionRecord
from tests.simulation.loop import current_lane

_FILE = Path(__file__).with_name("older_wire.binpb")
_POOL = descriptor_pool.DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(_FILE.read_bytes()).file:
    _POOL.Add(_file)


def clipped(name: str, data: bytes) -> bytes:
    """A message of this full name without what the older version does not know; of another package: as it is."""
    if not name.startswith("outrider."):
        return data
    message = message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name)).FromString(data)
    message.DiscardUnknownFields()
    return message.SerializeToString(deterministic=True)


def _clipped_here(name: str, data: bytes) -> bytes:
    lane = current_lane()
    return clipped(name, data) if lane is not None and lane.process.is_older else data


@contextmanager
def in_the_log() -> Iterator[None]:
    """Within it, gateways of the older version write and read requests' records and entries as that version does."""
    record, entry, extras = "outrider.v1.SessionRecord", "outrider.v1.CommitExtras", "extras"
    encode, decode = SessionRecord.encode, SessionRecord.decode
    entry_of, commit_of = commit_sink.entry_of, commit_sink.commit_of

    def written(*args: Any) -> Any:
        found = entry_of(*args)
        return dataclasses.replace(found, **{extras: _clipped_here(entry, found.extras)})

    with ExitStack() as stack:
        for place, name, value in (
            (SessionRecord, "encode", lambda self: _clipped_here(record, encode(self))),
            (SessionRecord, "decode", lambda data: decode(_clipped_here(record, data))),
            (commit_sink, "entry_of", written),
            (
                commit_sink,
                "commit_of",
                lambda found: commit_of(dataclasses.replace(found, extras=_clipped_here(entry, found.extras))),
            ),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        yield
