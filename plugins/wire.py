"""The drafter's messages, made from their descriptors at run time.

Generated code refuses a protobuf that is older than its generator; an engine brings the protobuf that it was made for.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

BATCH = "/outrider.v1.Drafter/Batch"


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    data = (files("outrider") / "v1" / "descriptors.binpb").read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _pool()


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"outrider.v1.{name}"))


DraftBatchRequest = _message("DraftBatchRequest")
DraftBatchReply = _message("DraftBatchReply")
DraftEngine = _message("DraftEngine")
SamplingParams = _message("SamplingParams")
EXACT: int = _POOL.FindEnumTypeByName("outrider.v1.SpeculationMode").values_by_name["SPECULATION_MODE_EXACT"].number
