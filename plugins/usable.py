"""What an engine and a drafter must know of each other: which tokens are the engine's, and which drafts it can use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from outrider.shared.checkpoint.tokenizer_digest import tokenizer_digest


class Draft(NamedTuple):
    """confidence: 0 to 255 of each token, or none. parents: index of each token's, -1 for the text; none: a chain."""

    token_ids: Sequence[int] = ()
    confidence: bytes = b""
    parents: Sequence[int] = ()


def usable(draft: Draft, *, num_tokens: int, vocab_size: int, min_confidence: float, max_branches: int = 1) -> Draft:
    """The draft's first tokens as far as they are likely enough, with parents; none if any id is not the engine's.

    A token that follows the same one twice is left out the second time: an engine that adds the probabilities of
    siblings up would accept it too often.
    """
    token_ids = draft.token_ids[:num_tokens]
    parents = draft.parents[: len(token_ids)] or range(-1, len(token_ids) - 1)
    is_tree = all(-1 <= parent < node for node, parent in enumerate(parents)) and len(parents) == len(token_ids)
    if not is_tree or not all(0 <= token_id < vocab_size for token_id in token_ids):
        return Draft()
    kept, joint, edges = {-1: -1}, {-1: 1.0}, list[tuple[int, int]]()
    for node, (token_id, parent) in enumerate(zip(token_ids, parents, strict=True)):
        edge = (kept.get(parent, -2), token_id)
        share = draft.confidence[node] / 255 if node < len(draft.confidence) else 1.0
        likely = joint.get(parent, 0.0) * share
        if edge[0] == -2 or likely < min_confidence or edge in edges or _branches(edges, edge[0]) >= max_branches:
            continue
        kept[node], joint[node] = len(edges), likely
        edges.append(edge)
    return Draft([token_id for _, token_id in edges], b"", [parent for parent, _ in edges])


def digest_of(name: str, revision: str | None) -> str:
    """The digest of a target's tokenizer, a folder or Hub id; "" where its tokenizer.json is not on this machine."""
    file = file_of(name, "tokenizer.json", revision)
    return "" if file is None else tokenizer_digest(file.parent)


def file_of(name: str, file: str, revision: str | None = None) -> Path | None:
    """A file of a model, a folder or Hub id; None where it is not on this machine."""
    if Path(name).is_dir():
        found: object = str(Path(name) / file)
    else:
        try:
            from huggingface_hub import try_to_load_from_cache  # type: ignore[import-not-found,unused-ignore]

            found = try_to_load_from_cache(name, file, revision=revision)
        except Exception:  # not a Hub id, or no such package
            return None
    return Path(found) if isinstance(found, str) and Path(found).is_file() else None


def _branches(edges: Sequence[tuple[int, int]], parent: int) -> int:
    return sum(entry == parent for entry, _ in edges)
