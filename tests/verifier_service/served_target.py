"""A loaded target with methods in its verifier, and whole sessions that decode with them, in free runs."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider.engine.certificate import Certificate, certify
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from outrider.shared.messages import Commit, LocalDrafts, SessionSpec, TokenOrigin
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.engine import VerifierEngine
from outrider.verifier_service.local_methods import build_local_methods
from tests.verifier_service.engine_client import EngineShape, Session, running_engine, tokens_of

log = logging.getLogger(__name__)


@dataclass
class Served:
    """A target, loaded, and what its verifier drafts with."""

    loaded: LoadedModel
    certificate: Certificate
    methods: tuple[str, ...]
    draft_model: tuple[str, ...] = ()
    local_kv_cache_mb: int = 128

    @contextmanager
    def engine(self, shape: EngineShape | None = None) -> Iterator[VerifierEngine]:
        shape = shape or EngineShape(num_blocks=400)
        config = VerifierConfig(
            model=self.loaded.path,
            local_methods=self.methods,
            local_draft_model=self.draft_model,
            local_kv_cache_mb=self.local_kv_cache_mb,
            dtype="float32",
            num_threads=1,
            block_size=shape.block_size,
        )
        methods = build_local_methods(config, self.loaded, log)
        with running_engine(self.loaded, self.certificate, shape, methods) as engine:
            yield engine


def served(folder: Path, methods: Sequence[str] = ("mtp",)) -> Served:
    loaded = load_model(str(folder), dtype="float32", num_threads=1)
    certificate = certify(loaded, ModelRunner(loaded, loaded.make_cache(64), loaded.make_states(1)))
    assert certificate.holds
    return Served(loaded, certificate, tuple(methods))


@dataclass(frozen=True)
class Outcome:
    """num_accepted: as the commits count it. origins: of the tokens."""

    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    num_draft_tokens: int
    num_accepted: int
    num_cached_tokens: int


def decode(engine: VerifierEngine, specs: Sequence[SessionSpec], local: LocalDrafts | None) -> list[Outcome]:
    """All sessions at once, to their end."""
    with ExitStack() as stack:
        sessions = [stack.enter_context(Session(engine, spec)) for spec in specs]
        for session in sessions:
            session.submit(0, max_new_tokens=session.spec.sampling_params.max_tokens, local=local)
        return [_outcome(session.collect()) for session in sessions]


def _outcome(commits: list[Commit]) -> Outcome:
    return Outcome(
        tokens_of(commits),
        tuple(origin for commit in commits for origin in commit.origins),
        sum(commit.num_draft_tokens for commit in commits),
        sum(commit.num_accepted_tokens for commit in commits),
        commits[0].num_cached_tokens,
    )


def digest(outcomes: Sequence[Outcome]) -> str:
    return hashlib.sha256(repr([outcome.token_ids for outcome in outcomes]).encode()).hexdigest()
