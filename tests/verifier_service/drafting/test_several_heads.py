"""Several heads of a kind at a verifier: the same output, the same law, new weights for one of them."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from outrider.drafting.serving.several import SeveralHeads
from outrider.shared.errors import ConfigError, InvalidRequest
from outrider.shared.messages import LocalDrafts, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.local_methods import build_local_methods, draft_loader
from tests.grid.driver import Driver, Session
from tests.grid.heads import save_random_head
from tests.grid.models import GridModel
from tests.grid.pools import CHUNKS, ROOMY_BLOCKS, Pools
from tests.verifier_service.acceptance.toy import SMALLEST_P_VALUE, chi_square_p_value
from tests.verifier_service.drafting.drafting_pair import LAW_VOCAB_SIZE, NUM_SESSIONS, sample_two_tokens
from tests.verifier_service.drafting.other_weights import with_noise

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=40, ignore_eos=True)
KINDS = ("draft_model", "eagle3")


@pytest.fixture(scope="module")
def folders(checkpoints: GridModel, pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """By kind, three checkpoints of one shape."""
    folder = tmp_path_factory.mktemp("several")
    save_random_head("eagle3", pools.target, folder / "eagle3")
    first = {"draft_model": checkpoints.draft, "eagle3": folder / "eagle3"}
    return {
        kind: [path, *(with_noise(path, folder / f"{kind}-{other}") for other in (1, 2))]
        for kind, path in first.items()
    }


def config_of(pools: Pools, drafts: list[str], *, loading: bool = False) -> VerifierConfig:
    return VerifierConfig(
        model=pools.target.path,
        local_draft_model=tuple(drafts),
        local_kv_cache_mb=16,
        allow_draft_loading=loading,
        dtype="float32",
        num_threads=1,
    )


def several(pools: Pools, folders: list[Path], *, loading: bool = False) -> SeveralHeads:
    named = [f"{name}={folder}" for name, folder in zip(("code", "chat"), folders, strict=False)]
    methods = build_local_methods(config_of(pools, named, loading=loading), pools.target, logging.getLogger())
    [method] = [method for method in methods.values() if isinstance(method, SeveralHeads)]
    return method


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_change_no_token(pools: Pools, folders: dict[str, list[Path]], kind: str, tree: bool) -> None:
    method = several(pools, folders[kind])
    pool = pools.start(CHUNKS["chunk16"], ROOMY_BLOCKS, {kind: method})

    def decode(params: SamplingParams, local: LocalDrafts | None) -> list[tuple[int, ...]]:
        prompts = [
            tuple(3 + (key * 7 + place * place) % (LAW_VOCAB_SIZE - 3) for place in range(20 + 9 * key))
            for key in range(8)
        ]
        specs = [
            SessionSpec(f"s{key}", 0, prompt, (), params, SpeculationMode.EXACT, stream_key=key)
            for key, prompt in enumerate(prompts)
        ]
        sessions = [Session(spec, None, 0, 7, local=local) for spec in specs]
        Driver(pool).run(sessions)
        assert [session.failure for session in sessions] == [""] * len(sessions)
        return [tuple(session.output) for session in sessions]

    try:
        for params in (GREEDY, SAMPLED):
            assert decode(params, LocalDrafts(kind, 4, tree)) == decode(params, None)
        [info] = pool.engine.local_methods
    finally:
        pool.engine.stop()
    assert sum(head.num_sessions for head in info.heads) == 16
    assert all(head.num_drafts > 0 for head in info.heads)


@pytest.mark.storm
@pytest.mark.parametrize(("kind", "tree"), [("draft_model", False), ("draft_model", True), ("eagle3", False)])
def test_heads_that_learn_who_is_better_keep_the_targets_law(
    pools: Pools, folders: dict[str, list[Path]], law_of_two: np.ndarray, kind: str, tree: bool
) -> None:
    method = several(pools, folders[kind])
    counts, num_drafted, num_accepted = sample_two_tokens(
        pools, method, tree, stream=700 + KINDS.index(kind) + 2 * tree
    )
    assert num_drafted > NUM_SESSIONS
    assert num_accepted > NUM_SESSIONS // 20
    assert all(head.num_sessions > NUM_SESSIONS // 20 for head in method.info.heads)
    assert chi_square_p_value(counts, law_of_two) > SMALLEST_P_VALUE


def test_new_weights_for_one_of_them(pools: Pools, folders: dict[str, list[Path]]) -> None:
    method = several(pools, folders["eagle3"], loading=True)
    pool = pools.start(CHUNKS["chunk16"], ROOMY_BLOCKS, {"eagle3": method})
    loader = draft_loader(config_of(pools, [], loading=True), pool.engine, pool.registry, logging.getLogger())
    other = folders["eagle3"][2]
    try:
        assert loader.load(f"chat={other}").version == 2
        for path in (str(other), f"docs={other}"):
            with pytest.raises(InvalidRequest, match="several eagle3 here: give NAME=FOLDER, NAME one of code, chat"):
                loader.load(path)
    finally:
        pool.engine.stop()
    assert [(head.name, head.version) for head in method.info.heads] == [("code", 1), ("chat", 2)]
    versions = {
        head: pool.registry.get_sample_value("outrider:draft_version", {"method": f"eagle3/{head}"})
        for head in ("code", "chat")
    }
    assert versions == {"code": 1, "chat": 2}


def test_two_of_a_kind_without_names_are_refused_with_the_fix(pools: Pools, folders: dict[str, list[Path]]) -> None:
    first, second, _ = map(str, folders["eagle3"])
    for drafts in ([first, second], [f"code={first}", second], [f"code={first}", f"code={second}"]):
        with pytest.raises(ConfigError, match=f"are both eagle3: give each a name of its own, as in code={first}"):
            build_local_methods(config_of(pools, drafts), pools.target, logging.getLogger())
