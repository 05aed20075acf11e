"""New weights for a verifier's own drafting while it serves: the same output, the same law, and what is refused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from outrider.drafting.checkpoints.recognise import recognise
from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.serving.loading import DraftLoader
from outrider.drafting.serving.versions import VersionedMethod
from outrider.drafting.session import DraftSession
from outrider.shared.errors import InvalidRequest, Overloaded
from outrider.shared.messages import LocalDrafts, Proposal, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.local_methods import build_local_methods, draft_loader
from tests.grid.driver import Driver, Session
from tests.grid.heads import save_random_head
from tests.grid.models import GridModel
from tests.grid.pools import CHUNKS, ROOMY_BLOCKS, Pool, Pools
from tests.verifier_service.acceptance.toy import SMALLEST_P_VALUE, chi_square_p_value
from tests.verifier_service.drafting.drafting_pair import (
    LAW_VOCAB_SIZE,
    NUM_SESSIONS,
    count_two_tokens,
    sample_two_tokens,
)
from tests.verifier_service.drafting.other_weights import with_nan, with_noise

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=40, ignore_eos=True)
KINDS = ("draft_model", "eagle3")


@dataclass(frozen=True)
class Drafts:
    """By kind: the folder that a verifier begins with, and one of other weights."""

    first: dict[str, Path]
    other: dict[str, Path]


@pytest.fixture(scope="module")
def drafts(checkpoints: GridModel, pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Drafts:
    folder = tmp_path_factory.mktemp("versions")
    save_random_head("eagle3", pools.target, folder / "eagle3")
    first = {"draft_model": checkpoints.draft, "eagle3": folder / "eagle3"}
    return Drafts(first, {kind: with_noise(path, folder / f"{kind}-other") for kind, path in first.items()})


def config_of(pools: Pools, folder: Path) -> VerifierConfig:
    return VerifierConfig(
        model=pools.target.path,
        local_draft_model=(str(folder),),
        local_methods=(recognise(folder),),
        local_kv_cache_mb=16,
        allow_draft_loading=True,
        dtype="float32",
        num_threads=1,
    )


def versioned(pools: Pools, folder: Path) -> VersionedMethod:
    config = config_of(pools, folder)
    [method] = build_local_methods(config, pools.target, logging.getLogger()).values()
    assert isinstance(method, VersionedMethod)
    return method


def plain(pools: Pools, folder: Path) -> DraftMethod:
    config = replace(config_of(pools, folder), allow_draft_loading=False)
    [method] = build_local_methods(config, pools.target, logging.getLogger()).values()
    return method


def prompt_of(key: int) -> tuple[int, ...]:
    """Each of its own length: in chunks, the sessions begin to draft in different rounds."""
    return tuple(3 + (key * 7 + place * place) % (LAW_VOCAB_SIZE - 3) for place in range(20 + 31 * key))


def decode(
    pool: Pool, params: SamplingParams, local: LocalDrafts | None, salts: Sequence[str] = ("",)
) -> list[Session]:
    specs = [
        SessionSpec(
            *(f"s{key}", 0, prompt_of(key), (), params, SpeculationMode.EXACT, key), cache_salt=salts[key % len(salts)]
        )
        for key in range(5)
    ]
    sessions = [Session(spec, None, 0, 7, local=local) for spec in specs]
    Driver(pool).run(sessions)
    assert [session.failure for session in sessions] == [""] * len(sessions)
    return sessions


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_swap_before_every_round_changes_no_token(
    pools: Pools, drafts: Drafts, kind: str, tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, waiting = versioned(pools, drafts.first[kind]), plain(pools, drafts.other[kind])
    pool = pools.start(CHUNKS["chunk16"], ROOMY_BLOCKS, {kind: method})
    draft, kept = pool.engine.rounds.local.draft, []

    def swap_and_draft(sessions: Sequence[object]) -> float:
        nonlocal waiting
        waiting = method.swap(waiting)
        kept.append(method.num_older)
        return draft(sessions)  # type: ignore[arg-type]

    monkeypatch.setattr(pool.engine.rounds.local, "draft", swap_and_draft)
    try:
        for params in (GREEDY, SAMPLED):
            expected = decode(pool, params, None)
            found = decode(pool, params, LocalDrafts(kind, 4, tree))
            assert [session.output for session in found] == [session.output for session in expected]
            assert sum(session.num_draft_tokens for session in found) > 40
        pool.engine.check_integrity()
    finally:
        pool.engine.stop()
    assert max(kept) == 1
    assert method.num_older == 0
    assert method.info.version == 1 + len(kept)


@pytest.mark.parametrize("kind", KINDS)
def test_swaps_of_all_salts_before_every_round_change_no_token(
    pools: Pools, drafts: Drafts, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, salts = versioned(pools, drafts.first[kind]), ("a", "b", "")
    waiting = {salt: [plain(pools, folder[kind]) for folder in (drafts.first, drafts.other)] for salt in ("a", "b")}
    pool = pools.start(CHUNKS["chunk16"], ROOMY_BLOCKS, {kind: method})
    draft, versions = pool.engine.rounds.local.draft, list[int]()

    def swap_and_draft(sessions: Sequence[object]) -> float:
        for salt, heads in waiting.items():
            heads.reverse()
            versions.append(method.try_out(heads[0], lambda _: None, salt).version)
        return draft(sessions)  # type: ignore[arg-type]

    monkeypatch.setattr(pool.engine.rounds.local, "draft", swap_and_draft)
    try:
        for params in (GREEDY, SAMPLED):
            expected = decode(pool, params, None, salts)
            found = decode(pool, params, LocalDrafts(kind, 4), salts)
            assert [session.output for session in found] == [session.output for session in expected]
            assert sum(session.num_draft_tokens for session in found) > 40
        pool.engine.check_integrity()
    finally:
        pool.engine.stop()
    assert versions == list(range(2, 2 + len(versions)))
    assert method.info.version == 1


class Restless(VersionedMethod):
    """Swaps before every session and before every round."""

    def __init__(self, method: DraftMethod, waiting: DraftMethod) -> None:
        super().__init__(method)
        self._waiting = waiting

    def open(self, session: DraftSession) -> None:
        self._waiting = self.swap(self._waiting)
        super().open(session)

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        self._waiting = self.swap(self._waiting)
        return super().propose(sessions)


class RestlessSalts(VersionedMethod):
    """Tries other weights out for each of two salts before every round."""

    def __init__(self, method: DraftMethod, waiting: dict[str, list[DraftMethod]]) -> None:
        super().__init__(method)
        self._waiting = waiting

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        for salt, heads in self._waiting.items():
            heads.reverse()
            self.try_out(heads[0], lambda _: None, salt)
        return super().propose(sessions)


class Mixed:
    """The mutant: tokens of one version are sent with the laws of another."""

    def __init__(self, method: DraftMethod, laws: DraftMethod) -> None:
        self._method, self._laws = method, laws
        self.info, self.grammars = method.info, method.grammars

    def open(self, session: DraftSession) -> None:
        self._method.open(session)
        self._laws.open(session)

    def advance(self, session: DraftSession) -> bool:
        return False

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        pairs = zip(self._method.propose(sessions), self._laws.propose(sessions), strict=True)
        return [replace(drawn, laws=other.laws) for drawn, other in pairs]

    def close(self, session: DraftSession) -> None:
        self._method.close(session)
        self._laws.close(session)


CASES = [(kind, tree) for kind in KINDS for tree in (False, True)]


@pytest.mark.storm
@pytest.mark.parametrize(("kind", "tree"), CASES)
def test_swaps_keep_the_targets_law(
    pools: Pools, drafts: Drafts, law_of_two: np.ndarray, kind: str, tree: bool
) -> None:
    method = Restless(plain(pools, drafts.first[kind]), plain(pools, drafts.other[kind]))
    stream = 400 + CASES.index((kind, tree))
    counts, num_drafted, num_accepted = sample_two_tokens(pools, method, tree, stream)
    assert num_drafted > NUM_SESSIONS
    assert num_accepted > NUM_SESSIONS // 20
    assert method.info.version > NUM_SESSIONS
    assert chi_square_p_value(counts, law_of_two) > SMALLEST_P_VALUE


@pytest.mark.storm
@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_salts_keep_the_targets_law(pools: Pools, drafts: Drafts, law_of_two: np.ndarray, kind: str) -> None:
    salts = ("a", "b", "")
    weights = (drafts.first[kind], drafts.other[kind])
    waiting = {salt: [plain(pools, folder) for folder in weights] for salt in salts if salt}
    method, sessions = RestlessSalts(plain(pools, drafts.first[kind]), waiting), list[Session]()

    def session_of(spec: SessionSpec) -> Session:
        spec = replace(spec, cache_salt=salts[spec.stream_key % len(salts)])
        sessions.append(Session(spec, method, gamma=3, free_run=1, tree=False, enough=2))
        return sessions[-1]

    pool = pools.pool("whole", ROOMY_BLOCKS)
    counts, num_drafted, num_accepted = count_two_tokens(pool, 420 + KINDS.index(kind), session_of)
    assert num_drafted > NUM_SESSIONS
    assert num_accepted > NUM_SESSIONS // 20
    assert chi_square_p_value(counts, law_of_two) > SMALLEST_P_VALUE
    for salt in salts:
        pairs = [each.output for each in sessions if each.spec.cache_salt == salt]
        first = np.bincount([pair[0] for pair in pairs], minlength=LAW_VOCAB_SIZE)
        law_of_one = law_of_two.reshape(LAW_VOCAB_SIZE, LAW_VOCAB_SIZE).sum(1)
        assert chi_square_p_value(first, law_of_one) > SMALLEST_P_VALUE


@pytest.mark.storm
def test_laws_of_another_version_than_the_tokens_would_show(
    pools: Pools, drafts: Drafts, law_of_two: np.ndarray
) -> None:
    method = Mixed(*(plain(pools, folder["draft_model"]) for folder in (drafts.first, drafts.other)))
    counts, _, _ = sample_two_tokens(pools, method, tree=False, stream=499)
    assert chi_square_p_value(counts, law_of_two) < SMALLEST_P_VALUE


@dataclass(frozen=True)
class Serving:
    pool: Pool
    loader: DraftLoader
    method: VersionedMethod

    def metric(self, name: str, **labels: str) -> float | None:
        return self.pool.registry.get_sample_value(name, labels)


@pytest.fixture
def serving(pools: Pools, drafts: Drafts) -> Iterator[Serving]:
    folder = drafts.first["eagle3"]
    method = versioned(pools, folder)
    pool = pools.start(CHUNKS["chunk16"], ROOMY_BLOCKS, {"eagle3": method})
    yield Serving(pool, draft_loader(config_of(pools, folder), pool.engine, pool.registry, logging.getLogger()), method)
    pool.engine.stop()


def test_weights_are_loaded_while_sessions_decode(serving: Serving, drafts: Drafts) -> None:
    local = LocalDrafts("eagle3", 4)
    expected = [session.output for session in decode(serving.pool, GREEDY, None)]
    versions: list[int] = []
    loading = threading.Thread(
        target=lambda: versions.extend(serving.loader.load(str(drafts.other["eagle3"])).version for _ in range(2))
    )
    loading.start()
    while loading.is_alive():
        assert [session.output for session in decode(serving.pool, GREEDY, local)] == expected
    loading.join()
    assert [session.output for session in decode(serving.pool, GREEDY, local)] == expected
    assert versions == [2, 3]
    [info] = serving.pool.engine.local_methods
    assert (info.version, info.model) == (3, "eagle3-other")
    assert serving.metric("outrider:draft_version", method="eagle3") == 3
    assert serving.metric("outrider:draft_loads_total", outcome="taken") == 2


def test_what_is_refused_leaves_the_drafts_as_they_are(serving: Serving, drafts: Drafts, tmp_path: Path) -> None:
    demo = Path(__file__).parents[3] / "models"
    refused = {
        with_nan(drafts.first["eagle3"], tmp_path / "nan"): "NaN|finite",
        drafts.first["draft_model"]: "methods with weights here: eagle3",
        demo / "demo-eagle3": "demo-eagle3",
        tmp_path / "nowhere": "no config.json",
    }
    for folder, words in refused.items():
        with pytest.raises(InvalidRequest, match=words):
            serving.loader.load(str(folder))
    assert serving.method.info.version == 1
    assert serving.metric("outrider:draft_loads_total", outcome="refused") == len(refused)
    assert sum(session.num_draft_tokens for session in decode(serving.pool, GREEDY, LocalDrafts("eagle3", 4))) > 0


def test_versions_in_memory_are_bounded(serving: Serving, drafts: Drafts) -> None:
    sessions = []
    for _ in range(2):
        spec = SessionSpec("s", 1, (5, 6), (), GREEDY, SpeculationMode.EXACT, 0)
        sessions.append(DraftSession(spec, [5, 6], lambda _reply: None))
        serving.method.open(sessions[-1])
        serving.loader.load(str(drafts.other["eagle3"]))
    with pytest.raises(Overloaded, match="older versions"):
        serving.loader.load(str(drafts.other["eagle3"]))
    serving.method.close(sessions[0])
    assert serving.loader.load(str(drafts.other["eagle3"])).version == 4
