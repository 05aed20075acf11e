"""What a session's verifier drafts by itself: what it can be asked for, and what it has been."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.drafter_line import CATCH_UP_TOKENS
from shared.messages import Commit, DraftMethodInfo, LocalDrafts, VerifierInfo


@dataclass(frozen=True)
class LocalMethods:
    """Of the verifier at `address`, by name."""

    address: str
    methods: Mapping[str, DraftMethodInfo]

    @classmethod
    def of(cls, address: str, info: VerifierInfo | None) -> LocalMethods:
        return cls(address, {method.name: method for method in (info.local_methods if info is not None else ())})


NO_LOCAL_METHODS = LocalMethods("", {})


class LocalLine:
    """A session's side of it."""

    def __init__(self, local: LocalMethods, *, token_tree: bool) -> None:
        self.address = local.address
        self._methods = local.methods
        self._token_tree = token_tree
        # Output that each method had read at its last draft; one that has drafted nothing yet has the prompt to read.
        self._read_len: dict[str, int] = {}
        # Whether the last draft was one before which the method had much to read: that says nothing of further ones.
        self.is_catch_up = False

    @property
    def is_there(self) -> bool:
        """Whether the verifier drafts by itself at all."""
        return bool(self._methods)

    def drafts(self, method: str, num_draft_tokens: int) -> LocalDrafts | None:
        """What to ask the verifier for; None where it does not serve the method, or nothing is wanted."""
        if num_draft_tokens == 0 or method not in self._methods:
            return None
        return LocalDrafts(method, num_draft_tokens, self._token_tree and self._methods[method].proposes_trees)

    def answered(self, method: str, commit: Commit) -> None:
        """The round of this commit began with a draft."""
        read_len = self._read_len.get(method)
        self.is_catch_up = read_len is None or commit.base_len - read_len > CATCH_UP_TOKENS
        self._read_len[method] = commit.end
