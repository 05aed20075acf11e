"""A draft model with another vocabulary than the target's: the shared tokens, and the committed text in draft ids.

Token-level intersection (Timor et al. 2025, arXiv:2502.05202, algorithm 4; vLLM's use_heterogeneous_vocab): tokens with
the same bytes are shared, and only shared ones are proposed. Proposals and their distributions are in target ids before
any acceptance rule sees them, so both modes are lossless for any map.

Not here: token bytes from tokenizer.json (token_bytes.py), running the draft model (methods/draft_model.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch

from outrider.drafting.checkpoints.errors import CheckpointRefused, refusing
from outrider.drafting.session import DraftSession
from outrider.drafting.vocabulary.target_vocabulary import TargetVocabulary
from outrider.drafting.vocabulary.token_bytes import TokenBytes, read_token_bytes
from outrider.engine.model.end_of_text import read_eos_token_ids
from outrider.engine.model.guards import read_config
from outrider.engine.sampling.laws import Row

# tokens; fewest shared ones, single bytes not counted; with fewer, drafts are accepted too rarely to pay for a forward.
# Measured with the demo pair, greedy, 4 draft tokens: 37 % accepted at 2,258 shared, 18 % at 758.
MIN_SHARED_TOKENS = 1_000
MIN_SHARED_SHARE = 0.05


@dataclass(frozen=True)
class ModelIds:
    """The token ids in a checkpoint's config; vocab_size: rows of its output head."""

    path: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, path: str) -> ModelIds:
        """Reads the config. Raises ModelRefused without a config.json that transformers knows."""
        config = read_config(path)
        text_config = config.get_text_config()
        vocab_size = int(text_config.vocab_size)
        bos = getattr(text_config, "bos_token_id", None)
        return cls(
            path,
            vocab_size,
            eos_token_ids=read_eos_token_ids(path, config),
            bos_token_ids=(bos,) if isinstance(bos, int) and bos < vocab_size else (),
        )


class VocabularyMap:
    """Maps draft ids to target ids; proposals use target ids. Not thread-safe."""

    def __init__(self, draft: ModelIds, target: ModelIds, draft_bytes: TokenBytes, target_bytes: TokenBytes) -> None:
        self.target = target
        self._draft_bytes, self._target_bytes = draft_bytes, target_bytes
        self._id_of_bytes = _by_bytes(draft_bytes)
        self._longest = max(map(len, self._id_of_bytes), default=0)
        # Maps draft id -> target id, one to one: each draft logit belongs to one target token.
        target_ids = _shared_text(self._id_of_bytes, _by_bytes(target_bytes))
        self.num_shared_words = sum(len(draft_bytes.ordinary[draft_id]) > 1 for draft_id in target_ids)
        target_ids |= _shared_names(draft_bytes, target_bytes)
        for draft_role, target_role in (
            (draft.eos_token_ids, target.eos_token_ids),
            (draft.bos_token_ids, target.bos_token_ids),
        ):
            _pair_role(target_ids, draft_role, target_role)
        self._twins = {target_id: draft_id for draft_id, target_id in target_ids.items()}
        self._spellings: dict[int, tuple[int, ...]] = {}
        self._eos_ids = dict.fromkeys(target.eos_token_ids, draft.eos_token_ids[:1])
        self._draft_columns = torch.tensor(list(target_ids), dtype=torch.int64)
        self._vocabulary = TargetVocabulary(
            target.vocab_size, torch.tensor(list(target_ids.values()), dtype=torch.int64)
        )
        first = draft_bytes.backend.encode("", add_special_tokens=True).ids[:1]
        self._bos_id = first[0] if first and first[0] in draft.bos_token_ids else None

    @property
    def num_shared(self) -> int:
        """Counts the shared texts, single bytes included, and shared names."""
        return len(self._twins)

    def twin(self, token_id: int) -> int | None:
        """Returns the draft's id of a target token that may be proposed; None if it is not shared."""
        return self._twins.get(token_id)

    def spell(self, token_id: int) -> tuple[int, ...]:
        """Returns draft ids for any target token; () if it has no text."""
        if token_id not in self._spellings:
            self._spellings[token_id] = self._spell(token_id)
        return self._spellings[token_id]

    def beginning(self, first_token_id: int) -> tuple[int, ...]:
        """Returns the prefix of a sequence: the draft's BOS, if its texts begin with one and this does not."""
        if self._bos_id is None or self.spell(first_token_id)[:1] == (self._bos_id,):
            return ()
        return (self._bos_id,)

    def rows(self, logits: torch.Tensor) -> Sequence[Row]:
        """Maps logits [N, draft vocabulary] -> float32 [N, target vocabulary]; -inf for tokens not shared."""
        return self._vocabulary.rows(logits[:, self._draft_columns.to(logits.device)])

    def _spell(self, token_id: int) -> tuple[int, ...]:
        twin = self._twins.get(token_id)
        if twin is not None:
            return (twin,)
        if token_id in self._eos_ids:
            return self._eos_ids[token_id]
        name = self._target_bytes.special.get(token_id)
        data = self._target_bytes.ordinary.get(token_id, b"") if name is None else name.encode()
        if data in self._id_of_bytes:  # <0x41> and A both map to the draft's A
            return (self._id_of_bytes[data],)
        return self._encode(data)

    def _encode(self, data: bytes) -> tuple[int, ...]:
        """Encodes bytes with the draft's tokenizer.

        Where that adds or loses something (a leading space), it takes the longest matches.
        """
        known = self._draft_bytes.ordinary
        try:
            ids = self._draft_bytes.backend.encode(data.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:  # part of a character
            ids = []
        if b"".join(known.get(token_id, b"") for token_id in ids) == data:
            return tuple(ids)
        found: list[int] = []
        start = 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._id_of_bytes), None)
            if end is not None:  # else the draft has no token for this byte
                found.append(self._id_of_bytes[data[start:end]])
            start = end or start + 1
        return tuple(found)


class DraftIds:
    """Holds a session's committed tokens in draft ids. Without a map: the session's own list, uncopied."""

    def __init__(self, vocabulary: VocabularyMap | None) -> None:
        self._vocabulary = vocabulary
        self.ids: list[int] = []
        # Length of `ids` after each of the target's tokens.
        self._ends: list[int] = []

    def follow(self, session: DraftSession) -> int:
        """Adds newly committed tokens; returns how many leading ids are unchanged since the last call."""
        unchanged_len = session.take_unchanged_len()
        vocabulary = self._vocabulary
        if vocabulary is None:
            self.ids = session.token_ids
            return unchanged_len
        kept = min(unchanged_len, len(self._ends))
        del self._ends[kept:]
        del self.ids[self._ends[-1] if kept else 0 :]
        unchanged_len = len(self.ids)
        if not kept and session.token_ids:
            self.ids.extend(vocabulary.beginning(session.token_ids[0]))
        for token_id in session.token_ids[kept:]:
            self.ids.extend(vocabulary.spell(token_id))
            self._ends.append(len(self.ids))
        return unchanged_len


def map_vocabulary(draft_path: str, target_path: str) -> VocabularyMap | None:
    """Maps a draft model's vocabulary; None when its token ids are the target's: same tokenizer, same number of ids.

    Without both tokenizer.json files, an equal number of ids counts as the same vocabulary. Raises CheckpointRefused
    for too few shared tokens, or a missing or unsupported tokenizer.json.
    """
    draft, target = ModelIds.read(draft_path), ModelIds.read(target_path)
    files = [Path(ids.path) / "tokenizer.json" for ids in (draft, target)]
    are_files = all(file.is_file() for file in files)
    has_same_size = draft.vocab_size == target.vocab_size
    if has_same_size and (not are_files or _hold_the_same(*files)):
        return None
    missing = next((file.parent for file in files if not file.is_file()), None)
    if missing is not None:
        sizes = f"the draft model has {draft.vocab_size} token ids, the target {target_path} has {target.vocab_size}"
        raise CheckpointRefused(missing, f"it has no tokenizer.json, and {sizes}", "add each model's tokenizer.json")
    draft_bytes = read_token_bytes(files[0].parent, draft.vocab_size)
    target_bytes = read_token_bytes(files[1].parent, target.vocab_size)
    found = VocabularyMap(draft, target, draft_bytes, target_bytes)
    num_texts = len(draft_bytes.ordinary)
    fewest = max(1, min(MIN_SHARED_TOKENS, math.ceil(num_texts * MIN_SHARED_SHARE)))
    if found.num_shared_words < fewest:
        cause = (
            f"its tokenizer shares {found.num_shared_words} of its {num_texts} tokens, single bytes aside, with the "
            f"{len(target_bytes.ordinary)} of the target {target_path}; at least {fewest} are needed"
        )
        raise CheckpointRefused(draft_path, cause, "use a draft model of the target's family")
    return found


def _hold_the_same(left: Path, right: Path) -> bool:
    """Returns whether two tokenizer.json give the same ids to the same tokens; settings and white space may differ."""
    if left.read_bytes() == right.read_bytes():
        return True
    known = []
    for file in (left, right):
        with refusing(file, "reading it"):
            backend = tokenizers.Tokenizer.from_file(str(file))
            special = {key for key, token in backend.get_added_tokens_decoder().items() if token.special}
            known.append((backend.get_vocab(with_added_tokens=True), special))
    return bool(known[0] == known[1])


def _by_bytes(tokens: TokenBytes) -> dict[bytes, int]:
    """Maps each text -> one id: an ordinary token before <0xNN>, then the smaller id."""
    found: dict[bytes, int] = {}
    for token_id in sorted(tokens.ordinary, key=lambda token_id: (token_id in tokens.fallback, token_id)):
        found.setdefault(tokens.ordinary[token_id], token_id)
    return found


def _shared_text(draft: Mapping[bytes, int], target: Mapping[bytes, int]) -> dict[int, int]:
    return {draft_id: target[data] for data, draft_id in draft.items() if data in target}


def _shared_names(draft: TokenBytes, target: TokenBytes) -> dict[int, int]:
    """Maps draft id -> target id of special tokens with the same name."""
    target_ids = {name: token_id for token_id, name in target.special.items()}
    return {token_id: target_ids[name] for token_id, name in draft.special.items() if name in target_ids}


def _pair_role(target_ids: dict[int, int], draft_role: Sequence[int], target_role: Sequence[int]) -> None:
    """Pairs a role's remaining tokens in the configs' order: </s> and <|endoftext|> both end a text."""
    taken = set(target_ids.values())
    draft_ids = [token_id for token_id in dict.fromkeys(draft_role) if token_id not in target_ids]
    free_ids = [token_id for token_id in dict.fromkeys(target_role) if token_id not in taken]
    target_ids.update(zip(draft_ids, free_ids, strict=False))
