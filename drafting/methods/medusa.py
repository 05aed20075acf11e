"""Medusa drafts (Cai et al. 2024, arXiv:2401.10774): head i predicts the token at i + 1 past the last committed.

The heads read only the target's hidden state, never each other's tokens: one call gives all depths, and a tree is a
product of their predictions. A session's only state is its last hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.drafting.growth.draft import Draft
from outrider.drafting.heads.medusa import MedusaHeads
from outrider.drafting.session import DraftSession
from outrider.drafting.vocabulary.target_vocabulary import TargetVocabulary
from outrider.engine.sampling.laws import Row


class MedusaNet:
    """Implements drafting.methods.net.DraftNet over Medusa heads."""

    def __init__(
        self,
        heads: MedusaHeads,
        vocabulary: TargetVocabulary,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Takes the heads, which are already on the device."""
        self._heads = heads
        self._vocabulary = vocabulary
        self._dtype = dtype
        self._device = torch.device(device)
        # Logits of the current proposal: [num_heads, V] per session.
        self._guesses: dict[int, Sequence[Row]] = {}

    def open(self, session: DraftSession) -> None:
        pass

    def advance(self, session: DraftSession) -> bool:
        return False

    @torch.inference_mode()
    def logits(self, drafts: Sequence[Draft]) -> list[Sequence[Row]]:
        fresh = [draft for draft in drafts if not draft.nodes and has_last_row(draft)]
        if fresh:
            hidden = torch.cat([last_row(draft.session) for draft in fresh]).to(self._device, self._dtype)
            for draft, guesses in zip(fresh, self._heads(hidden), strict=True):
                self._guesses[id(draft.session)] = self._vocabulary.rows(guesses)
        answers: list[Sequence[Row]] = []
        for draft in drafts:
            depth = draft.depth
            answers.append([self._guesses[id(draft.session)][depth] for _ in draft.frontier])
        return answers

    @torch.inference_mode()
    def draw_chains(self, drafts: Sequence[Draft]) -> None:
        """Finishes plain chains on the device, all tokens in one draw."""
        from outrider.engine.sampling.device_draws import draw_at_once  # needs triton, installed on GPU machines

        fresh = [draft for draft in drafts if has_last_row(draft)]
        if not fresh:
            return
        hidden = torch.cat([last_row(draft.session) for draft in fresh]).to(self._device, self._dtype)
        by_depth = self._heads(hidden).transpose(0, 1)
        logits = self._vocabulary.spread(by_depth.flatten(0, 1)).view(*by_depth.shape[:2], -1)
        chains = draw_at_once(logits, [draft.chain_draws() for draft in fresh])
        for draft, chain in zip(fresh, chains, strict=True):
            draft.take_chain(chain)

    def close(self, session: DraftSession) -> None:
        self._guesses.pop(id(session), None)


def has_last_row(draft: Draft) -> bool:
    """Returns whether the hidden state that predicted the last committed token has arrived; if not, requests it."""
    session = draft.session
    last = len(session.token_ids) - 2
    if session.hidden.first <= last < session.hidden.end:
        return True
    session.missing_hidden_from = last - session.prompt_len
    draft.stop()
    return False


def last_row(session: DraftSession) -> torch.Tensor:
    """Returns the session's last hidden state [1, width]; drops earlier rows."""
    last = len(session.token_ids) - 2
    session.hidden.forget_before(last)
    return session.hidden.rows(last, last + 1)
