"""Proposals whose chains were drawn on the device are those that grow on the host; what looks back stays there."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.drafting.methods.draft_model import DraftModelNet, draft_model_method
from outrider.drafting.methods.growing import GrowingMethod
from outrider.drafting.session import DraftSession
from outrider.engine.attention.block_manager import BlockManager
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from outrider.engine.sampling.chains import ModelForward
from outrider.engine.sampling.device_chains import DeviceChains
from outrider.shared.messages import DraftStep, Proposal, SessionSpec
from tests.drafting.drawn_cases import (
    LAWS,
    NUM_PLAIN,
    SCRIPT,
    committed_after,
    counted,
    expect_equal_rounds,
    prompt_at,
)
from tests.kernels.triton_device import device
from tests.verifier_service.engine_client import save_hybrid, save_llama

pytestmark = pytest.mark.gpu

_NUM_BLOCKS, _BLOCK_SIZE = 60, 4


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = save_llama(tmp_path_factory.mktemp("draft"), seed=5, num_layers=1, max_len=64)
    return load_model(str(folder), dtype="float32", device=device().type, attention_backend="triton")


def _method(loaded: LoadedModel, *, draws: bool) -> tuple[GrowingMethod, BlockManager]:
    blocks = BlockManager(_NUM_BLOCKS, _BLOCK_SIZE)
    runner = ModelRunner(loaded, loaded.make_cache(_NUM_BLOCKS, _BLOCK_SIZE))
    chains = DeviceChains(ModelForward(runner)) if draws else None
    net = DraftModelNet(runner, blocks, prefill_chunk_size=32, chains=chains)
    return draft_model_method(net, "tiny"), blocks


def _proposals(loaded: LoadedModel, *, draws: bool) -> list[dict[str, Proposal]]:
    method, blocks = _method(loaded, draws=draws)
    sessions = {}
    for place, (name, (params, mode)) in enumerate(LAWS.items()):
        prompt = tuple(prompt_at(place))
        spec = SessionSpec(name, 1, prompt, (), params, mode, 7 + place, method="draft_model")
        sessions[name] = DraftSession(spec, list(prompt), lambda _reply: None)
        method.open(sessions[name])
    rounds: list[dict[str, Proposal]] = []
    for script, count in SCRIPT:
        for place, (name, session) in enumerate(sessions.items()):
            drafted = rounds[-1][name].token_ids if rounds else ()
            new = tuple(committed_after(script, drafted))
            session.report(DraftStep(1, session.committed_len, new, count + place % 2))
        found = method.propose(list(sessions.values()))
        rounds.append(dict(zip(sessions, found, strict=True)))
        blocks.check_integrity()
    for session in sessions.values():
        method.close(session)
    assert blocks.num_free_blocks == _NUM_BLOCKS
    return rounds


@pytest.mark.storm
def test_plain_chains_are_drawn_there_and_all_proposals_are_those_of_the_host(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = counted(monkeypatch)
    by_device = _proposals(loaded, draws=True)
    assert len(taken) == NUM_PLAIN * len(SCRIPT)
    expect_equal_rounds(by_device, _proposals(loaded, draws=False))
    assert len(taken) == NUM_PLAIN * len(SCRIPT), "the host's chains grow"


def test_a_hybrids_chains_grow_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step on the device has no recurrent states."""
    hybrid = load_model(str(save_hybrid(tmp_path)), dtype="float32", device="cpu")
    blocks = BlockManager(_NUM_BLOCKS, _BLOCK_SIZE)
    runner = ModelRunner(hybrid, hybrid.make_cache(_NUM_BLOCKS, _BLOCK_SIZE), hybrid.make_states(4))
    net = DraftModelNet(runner, blocks, prefill_chunk_size=32, chains=DeviceChains(ModelForward(runner)))
    method = draft_model_method(net, "tiny")
    taken = counted(monkeypatch)
    prompt, (params, mode) = tuple(prompt_at(0)), LAWS["greedy"]
    spec = SessionSpec("s", 1, prompt, (), params, mode, 7, method="draft_model")
    session = DraftSession(spec, list(prompt), lambda _reply: None)
    method.open(session)
    session.report(DraftStep(1, session.committed_len, (), 3))
    (proposal,) = method.propose([session])
    assert len(proposal.token_ids) == 3
    assert taken == []
    method.close(session)
    assert blocks.num_free_blocks == _NUM_BLOCKS
