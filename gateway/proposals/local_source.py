"""Local drafts: a session's verifier makes them within its own rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.gateway.metrics import DraftCame
from outrider.gateway.proposals.ask import Answer, Ask
from outrider.gateway.proposals.drafter_connection import CATCH_UP_TOKENS
from outrider.shared.messages import Commit, DraftMethodInfo, LocalDrafts, SessionSpec, Timings, VerifierInfo


@dataclass(frozen=True)
class LocalMethods:
    """Of the verifier at `address`, by name."""

    address: str
    methods: Mapping[str, DraftMethodInfo]

    @classmethod
    def of(cls, address: str, info: VerifierInfo | None) -> LocalMethods:
        return cls(address, {method.name: method for method in (info.local_methods if info is not None else ())})


NO_LOCAL_METHODS = LocalMethods("", {})


class LocalSource:
    """A DraftSource. One answer begins a run of rounds; each round's commit says what was drafted for it."""

    def __init__(self, spec: SessionSpec, local: LocalMethods, *, token_tree: bool) -> None:
        self.address = local.address
        self._max_tokens = spec.sampling_params.max_tokens
        self._methods = local.methods
        self._token_tree = token_tree
        # Output length that each method had read at its last draft; a method that is missing has the prompt to read.
        self._read_len: dict[str, int] = {}

    async def answer(self, ask: Ask) -> Answer | None:
        """The run lasts to the end of the output; the verifier can be steered within it."""
        drafts = self.drafts(ask)
        if not self._methods or (ask.num_draft_tokens and drafts is None):
            return None
        return Answer(ask, local_drafts=drafts, max_new_tokens=self._max_tokens)

    def drafts(self, ask: Ask) -> LocalDrafts | None:
        """What to ask the verifier for; None where it does not serve the method, or nothing is wanted."""
        if ask.num_draft_tokens == 0 or ask.method not in self._methods:
            return None
        has_trees = self._token_tree and self._methods[ask.method].proposes_trees
        return LocalDrafts(ask.method, ask.num_draft_tokens, has_trees)

    def drafted(self, answer: Answer, commit: Commit) -> Answer:
        drafts, draft_us = commit.local_drafts, commit.timings.draft_us
        if drafts is None:
            return answer.for_commit(commit)
        read_len = self._read_len.get(drafts.method)
        self._read_len[drafts.method] = commit.end
        return Answer(
            Ask(commit.base_len, drafts.method, drafts.num_draft_tokens),
            came=DraftCame.YES if commit.num_draft_tokens else DraftCame.EMPTY,
            local_drafts=drafts,
            method=drafts.method,
            drafter=self.address,
            wait_s=draft_us * 1e-6,
            timings=Timings(forward_us=draft_us, total_us=draft_us),
            is_catch_up=read_len is None or commit.base_len - read_len > CATCH_UP_TOKENS,
        )

    async def close(self) -> None:
        """Nothing to give back: the session is the verifier's."""
