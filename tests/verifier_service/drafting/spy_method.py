"""A draft method that proposes what a test says, and a verifier's engine that drafts with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.session import DraftSession
from outrider.engine.certificate import Certificate
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.shared.messages import DraftMethodInfo, Proposal
from outrider.verifier_service.engine import VerifierEngine
from tests.verifier_service.engine_client import EngineShape, running_engine


class Spy:
    """A DraftMethod that proposes what it is told to, and keeps what it was given."""

    def __init__(self, guess: Callable[[DraftSession], Sequence[int]], layers: tuple[int, ...] = ()) -> None:
        self.info = DraftMethodInfo(name="spy", hidden_layers=layers, takes_hidden_history=bool(layers), hidden_size=64)
        self.grammars: GrammarCompiler | None = None
        self.batches: list[int] = []
        self.rows: dict[int, torch.Tensor] = {}
        self.num_open = 0
        self._guess = guess

    def open(self, session: DraftSession) -> None:
        self.num_open += 1

    def advance(self, session: DraftSession) -> bool:
        return False

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        self.batches.append(len(sessions))
        for session in sessions:
            if self.info.hidden_layers:
                self.rows[len(session.token_ids)] = session.hidden.rows(0, len(session.token_ids) - 1).clone()
        return [Proposal(session.committed_len, tuple(self._guess(session)), "spy") for session in sessions]

    def close(self, session: DraftSession) -> None:
        self.num_open -= 1


@contextmanager
def engine_with(
    spy: DraftMethod, loaded: LoadedModel, certificate: Certificate, shape: EngineShape | None = None
) -> Iterator[VerifierEngine]:
    methods: Mapping[str, DraftMethod] = {"spy": spy}
    with running_engine(loaded, certificate, shape, methods) as engine:
        yield engine
