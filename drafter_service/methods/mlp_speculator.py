"""The MLP speculator drafts (Wertheimer et al. 2024, arXiv:2404.19124): a small recurrent net, one step per token.

Its state starts from the target's last hidden state and takes up each drafted token; every node of a tree has a state
of its own. Nothing is kept of a session but its last hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafter_service.growth.draft import ROOT, Draft
from drafter_service.heads.mlp_speculator import MlpSpeculator
from drafter_service.methods.medusa import has_last_row, last_row
from drafter_service.methods.target_vocabulary import TargetVocabulary
from drafter_service.session import DraftSession
from engine.sampling import Row


class MlpSpeculatorNet:
    """drafter_service.methods.net.DraftNet over an MLP speculator."""

    def __init__(
        self,
        speculator: MlpSpeculator,
        vocabulary: TargetVocabulary,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """The speculator is on the device."""
        self._speculator = speculator
        self._vocabulary = vocabulary
        self._dtype = dtype
        self._device = torch.device(device)
        # Of the proposal in the making: session -> place -> state [1, width] after the token of that place.
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
        """Finishes plain chains without their tokens or logits coming to the host in between."""
        from engine.device_draws import Drawn, DrawTables, any_laws, chains_on_host, draw_rows  # triton: with a GPU

        fresh = [draft for draft in drafts if has_last_row(draft)]
        if not fresh:
            return
        hidden = torch.cat([last_row(draft.session) for draft in fresh]).to(self._device, self._dtype)
        state = self._speculator.start(hidden)
        token_ids = torch.tensor([draft.session.token_ids[-1] for draft in fresh], device=self._device)
        chains = [draft.chain_draws() for draft in fresh]
        num_steps, with_laws = max(draws.num_tokens for draws in chains), any_laws(chains)
        tables = DrawTables.of_chains(chains, num_steps, len(chains), self._device)
        steps = []
        # Chains that have ended go along: what they draw is cut off at the end.
        for depth in range(num_steps):
            state, logits = self._speculator.step(state, token_ids, depth)
            logits = self._vocabulary.spread(logits)
            key_words, law_places = tables.key_words[depth], tables.law_places[depth]
            steps.append(draw_rows(logits, tables.transforms, key_words, law_places, with_laws=with_laws))
            token_ids = steps[-1].tokens.clamp(min=0)
        for draft, chain in zip(fresh, chains_on_host(Drawn.of_steps(steps), chains), strict=True):
            draft.take_chain(chain)

    def close(self, session: DraftSession) -> None:
        self._states.pop(id(session), None)

    def _step(self, drafts: Sequence[Draft], depth: int) -> dict[int, Sequence[Row]]:
        """One step of all places at a depth: from the state above a place, with the token of the place."""
        places = [(draft, place) for draft in drafts for place in draft.frontier]
        above = [
            self._states[id(draft.session)][ROOT if place == ROOT else draft.nodes[place].parent]
            for draft, place in places
        ]
        if depth > 0:  # the state of ROOT has been replaced by the one after the last committed token
            tokens = [draft.nodes[place].token_id for draft, place in places]
        else:
            tokens = [draft.session.token_ids[-1] for draft, _place in places]
        states, logits = self._speculator.step(torch.cat(above), torch.tensor(tokens, device=self._device), depth)
        rows = iter(self._vocabulary.rows(logits))
        for (draft, place), state in zip(places, states, strict=True):
            self._states[id(draft.session)][place] = state[None]
        return {id(draft): [next(rows) for _ in draft.frontier] for draft in drafts}
