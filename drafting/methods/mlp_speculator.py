"""MLP speculator drafts (Wertheimer et al. 2024, arXiv:2404.19124): a small recurrent net, one step per token.

Its state starts from the target's last hidden state and absorbs each draft token; every node of a tree has its own
state. A session's only state is its last hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.drafting.growth.draft import ROOT, Draft
from outrider.drafting.heads.mlp_speculator import MlpSpeculator
from outrider.drafting.methods.medusa import has_last_row, last_row
from outrider.drafting.session import DraftSession
from outrider.drafting.vocabulary.target_vocabulary import TargetVocabulary
from outrider.engine.sampling.laws import Row


class MlpSpeculatorNet:
    """Implements drafting.methods.net.DraftNet over an MLP speculator."""

    def __init__(
        self,
        speculator: MlpSpeculator,
        vocabulary: TargetVocabulary,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Takes the speculator, which is already on the device."""
        self._speculator = speculator
        self._vocabulary = vocabulary
        self._dtype = dtype
        self._device = torch.device(device)
        # States of the current proposal: session -> position -> state [1, width] after the token there.
        self._states: dict[int, dict[int, torch.Tensor]] = {}

    def open(self, session: DraftSession) -> None:
        pass

    def advance(self, session: DraftSession) -> bool:
        return False

    @torch.inference_mode()
    def logits(self, drafts: Sequence[Draft]) -> list[Sequence[Row]]:
        for draft in drafts:
            if not draft.nodes and has_last_row(draft):
                start = self._speculator.start(last_row(draft.session).to(self._device, self._dtype))
                self._states[id(draft.session)] = {ROOT: start}
        answers: dict[int, Sequence[Row]] = {}
        for depth in sorted({draft.depth for draft in drafts if draft.frontier}):
            level = [draft for draft in drafts if draft.frontier and draft.depth == depth]
            answers |= self._step(level, depth)
        return [answers.get(id(draft), ()) for draft in drafts]

    @torch.inference_mode()
    def draw_chains(self, drafts: Sequence[Draft]) -> None:
        """Finishes plain chains on the device, without copying tokens or logits to the host."""
        from outrider.engine.sampling.device_draws import draw_steps  # needs triton, installed on GPU machines

        fresh = [draft for draft in drafts if has_last_row(draft)]
        if not fresh:
            return
        hidden = torch.cat([last_row(draft.session) for draft in fresh]).to(self._device, self._dtype)
        state = self._speculator.start(hidden)
        committed = torch.tensor([draft.session.token_ids[-1] for draft in fresh], device=self._device)

        def step(token_ids: torch.Tensor | None, depth: int) -> torch.Tensor:
            nonlocal state
            state, logits = self._speculator.step(state, committed if token_ids is None else token_ids, depth)
            return self._vocabulary.spread(logits)

        chains = draw_steps([draft.chain_draws() for draft in fresh], step, self._device)
        for draft, chain in zip(fresh, chains, strict=True):
            draft.take_chain(chain)

    def close(self, session: DraftSession) -> None:
        self._states.pop(id(session), None)

    def _step(self, drafts: Sequence[Draft], depth: int) -> dict[int, Sequence[Row]]:
        """Runs one step for all positions at a depth: from the parent's state, with the position's token."""
        positions = [(draft, position) for draft in drafts for position in draft.frontier]
        above = [
            self._states[id(draft.session)][ROOT if position == ROOT else draft.nodes[position].parent]
            for draft, position in positions
        ]
        if depth > 0:  # ROOT's state is already the one after the last committed token
            tokens = [draft.nodes[position].token_id for draft, position in positions]
        else:
            tokens = [draft.session.token_ids[-1] for draft, _position in positions]
        states, logits = self._speculator.step(torch.cat(above), torch.tensor(tokens, device=self._device), depth)
        rows = iter(self._vocabulary.rows(logits))
        for (draft, position), state in zip(positions, states, strict=True):
            self._states[id(draft.session)][position] = state[None]
        return {id(draft): [next(rows) for _ in draft.frontier] for draft in drafts}
