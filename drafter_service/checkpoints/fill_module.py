"""Filling a head, built on the meta device, with the tensors of a checkpoint. Every mismatch is refused.

Not here: the names in the file (the loaders) and the head's config.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import torch

from drafter_service.checkpoints.errors import CheckpointRefused, refusing
from drafter_service.checkpoints.target_weights import TargetWeights
from drafter_service.checkpoints.tensor_table import TensorTable

Head = TypeVar("Head", bound=torch.nn.Module)


def build_on_meta(table: TensorTable, build: Callable[[], Head]) -> Head:
    """The head with all of its own tensors on the meta device: shapes are known, nothing is allocated."""
    with refusing(table.folder, "building the head"), torch.device("meta"):
        head = build()
    return head


def fill(
    head: Head,
    table: TensorTable,
    dtype: torch.dtype,
    *,
    sources: Mapping[str, str] | None = None,
    given: Mapping[str, torch.Tensor] | None = None,
    ignored: Collection[str] = (),
) -> Head:
    """Load every tensor of the head's state dict, in eval mode.

    sources: name in the head -> name in the file, where they differ. given: tensors by name in the head that are
    already read. ignored: names in the file that are of no use. Floats become `dtype`.
    Raises CheckpointRefused on a missing or unexpected tensor, another shape or type, or a number that is not finite.
    """
    sources, given = sources or {}, given or {}
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items() if name not in given}
    for name, shape in wanted.items():
        source = sources.get(name, name)
        if source not in table:
            cause = f"tensor {source} {list(shape)} is missing; there are {table.summary()}"
            raise CheckpointRefused(table.folder, cause)
        if table.shape(source) != shape:
            cause = f"tensor {source} has shape {list(table.shape(source))}, the config says {list(shape)}"
            raise CheckpointRefused(table.folder, cause)
    known = {sources.get(name, name) for name in wanted} | {sources.get(name, name) for name in given} | set(ignored)
    for name in sorted(table.tensors.keys() - known):
        cause = f"tensor {name} {list(table.shape(name))} is unexpected: such a head, by its config, has none"
        raise CheckpointRefused(table.folder, cause)
    tensors = {name: table.floats(sources.get(name, name), dtype) for name in wanted}
    with refusing(table.folder, "filling the head"):
        head.load_state_dict(tensors | dict(given), assign=True)
    return head.eval()


def require_ids(table: TensorTable, name: str, token_ids: torch.Tensor, vocab_size: int) -> None:
    """Raises CheckpointRefused unless the target ids of a reduced vocabulary are distinct and all in the target's."""
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if bool(outside.any()):
        place = int(outside.nonzero()[0])
        cause = f"tensor {name} maps draft id {place} to target id {int(token_ids[place])}, the target has {vocab_size}"
        raise CheckpointRefused(table.folder, f"{cause} tokens")
    ascending = token_ids.sort().values
    repeated = ascending[1:][ascending[1:] == ascending[:-1]]
    if repeated.numel():
        raise CheckpointRefused(table.folder, f"tensor {name} maps two draft ids to target id {int(repeated[0])}")


def is_target_embedding(table: TensorTable, target: TargetWeights, dtype: torch.dtype) -> bool:
    """Whether the head uses the target's embedding: it brings none, or one with the same numbers.

    Most public checkpoints bring a copy; for a vocabulary of 128k that is a gigabyte that need not be held twice.
    """
    name = "embed_tokens.weight"
    if name not in table:
        return True
    if table.shape(name) != tuple(target.embedding.shape):
        return False
    return bool(torch.equal(table.floats(name, dtype), target.embedding.to(dtype)))
