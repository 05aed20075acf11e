"""Fills a head, built on the meta device, with a checkpoint's tensors; refuses every mismatch.

Not here: the names in the file (the loaders) and the head's config.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch

from outrider.drafting.checkpoints.errors import CheckpointRefused, refusing
from outrider.drafting.checkpoints.target_weights import TargetWeights
from outrider.drafting.checkpoints.tensor_table import TensorTable
from outrider.drafting.heads.frozen import use_targets

Head = TypeVar("Head", bound=torch.nn.Module)


def build_on_meta(table: TensorTable, build: Callable[[], Head]) -> Head:
    """Builds the head with its own tensors on the meta device: shapes are known, nothing is allocated."""
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
    """Loads every tensor of the head's state dict; sets eval mode.

    sources: name in the head -> name in the file, where they differ. given: already loaded tensors by name in the head.
    ignored: unused names in the file. Floats become `dtype`.
    Raises CheckpointRefused for a missing or unexpected tensor, a wrong shape or type, or non-finite numbers.
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
        cause = f"tensor {name} {list(table.shape(name))} is unexpected: by its config, the head has none"
        raise CheckpointRefused(table.folder, cause)
    tensors = {name: table.floats(sources.get(name, name), dtype) for name in wanted}
    with refusing(table.folder, "filling the head"):
        head.load_state_dict(tensors | dict(given), assign=True)
    return head.eval()


def build_and_fill(
    make: Callable[..., Head],
    config: Any,
    table: TensorTable,
    target: TargetWeights,
    dtype: torch.dtype,
    *,
    attn_implementation: str,
    sources: Mapping[str, str] | None = None,
    given: Mapping[str, torch.Tensor] | None = None,
    useless: re.Pattern[str],
) -> Head:
    """Loads a head with a draft vocabulary, made with the target's embedding and output head where it has none.

    useless: of names in the file that are not read; the others as in `fill`. Raises CheckpointRefused.
    """
    if not config.has_lm_head:
        target.require_plain_lm_head(table.folder)
    d2t = read_d2t(table, config.draft_vocab_size, config.decoder.vocab_size)
    embedding = None if config.has_embedding else target.frozen_embedding(dtype)
    lm_head = None if config.has_lm_head else target.frozen_lm_head(dtype)
    head = build_on_meta(
        table,
        lambda: make(config, embedding=embedding, lm_head=lm_head, d2t=d2t, attn_implementation=attn_implementation),
    )
    ignored = {name for name in table.tensors if useless.fullmatch(name)}
    ignored |= set() if config.has_embedding else {"embed_tokens.weight"}
    ignored |= set() if config.has_lm_head else {"lm_head.weight"}
    given = dict(given or {}) | ({} if d2t is None else {"d2t": d2t})
    fill(head, table, dtype, sources=sources, given=given, ignored=ignored)
    if target.model is not None:
        use_targets(head, target.model)
    return head


def require_ids(table: TensorTable, name: str, token_ids: torch.Tensor, vocab_size: int) -> None:
    """Raises CheckpointRefused unless a reduced vocabulary's target ids are distinct and within the target's."""
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if bool(outside.any()):
        draft_id = int(outside.nonzero()[0])
        target_id = int(token_ids[draft_id])
        cause = f"tensor {name} maps draft id {draft_id} to target id {target_id}, the target has {vocab_size}"
        raise CheckpointRefused(table.folder, f"{cause} tokens")
    ascending = token_ids.sort().values
    repeated = ascending[1:][ascending[1:] == ascending[:-1]]
    if repeated.numel():
        raise CheckpointRefused(table.folder, f"tensor {name} maps two draft ids to target id {int(repeated[0])}")


def read_d2t(table: TensorTable, draft_vocab_size: int, vocab_size: int) -> torch.Tensor | None:
    """Reads the offsets from draft to target ids; None if the head has the whole vocabulary and no offsets."""
    if "d2t" not in table and draft_vocab_size == vocab_size:
        return None
    if table.shape("d2t") != (draft_vocab_size,):
        cause = f"tensor d2t has shape {list(table.shape('d2t'))}, the config says {[draft_vocab_size]}"
        raise CheckpointRefused(table.folder, cause)
    d2t = table.integers("d2t")
    require_ids(table, "d2t", d2t + torch.arange(d2t.numel()), vocab_size)
    return d2t


def is_targets(table: TensorTable, name: str, read: Callable[[], torch.Tensor], dtype: torch.dtype) -> bool:
    """Returns whether the head uses a matrix of the target: it has none, or one with the same numbers.

    Most public checkpoints contain a copy; with 128k tokens, sharing saves a gigabyte.
    """
    if name not in table:
        return True
    matrix = read()
    if table.shape(name) != tuple(matrix.shape):
        return False
    return bool(torch.equal(table.floats(name, dtype), matrix.to(dtype)))
