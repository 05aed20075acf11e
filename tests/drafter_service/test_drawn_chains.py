"""Proposals whose chains were drawn on the device are those that grow on the host; what looks back stays there."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter_service.methods.draft_model import DraftModelNet, draft_model_method
from drafter_service.methods.growing import GrowingMethod
from drafter_service.session import DraftSession
from engine.block_manager import BlockManager
from engine.device_chains import DeviceChains
from engine.model import LoadedModel, load_model
from engine.runner import ModelRunner
from shared.messages import DraftStep, Proposal, SessionSpec
from shared.sampling_params import SamplingParams, SpeculationMode
from tests.kernels.triton_device import device
from tests.verifier_service.engine_client import save_llama

_NUM_BLOCKS, _BLOCK_SIZE = 40, 4
_LAWS = {
    "greedy": (SamplingParams(temperature=0.0), SpeculationMode.EXACT),
    "drawn": (SamplingParams(temperature=0.9, top_p=0.9, seed=3), SpeculationMode.EXACT),
    "penalised": (SamplingParams(temperature=0.0, frequency_penalty=0.7), SpeculationMode.EXACT),
    "rejection": (SamplingParams(temperature=0.9), SpeculationMode.REJECTION),
}
# Committed since the last proposal, and tokens wanted: agreement as far as -1 goes on, contradiction, a long report.
_SCRIPT = [([], 4), ([-1, -1, 9], 3), ([-1], 2), ([1, 2, 3, 4, 5, 6], 1)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = save_llama(tmp_path_factory.mktemp("draft"), seed=5, num_layers=1, max_len=64)
    return load_model(str(folder), dtype="float32", device=device().type, attention_backend="triton")


def _method(loaded: LoadedModel, *, draws: bool) -> tuple[GrowingMethod, BlockManager]:
    blocks = BlockManager(_NUM_BLOCKS, _BLOCK_SIZE)
    runner = ModelRunner(loaded, loaded.make_cache(_NUM_BLOCKS, _BLOCK_SIZE))
    chains = DeviceChains(runner) if draws else None
    net = DraftModelNet(runner, blocks, prefill_chunk_size=32, chains=chains)
    return draft_model_method(net, "tiny"), blocks


def _proposals(loaded: LoadedModel, *, draws: bool) -> list[dict[str, Proposal]]:
    method, blocks = _method(loaded, draws=draws)
    sessions = {}
    for place, (name, (params, mode)) in enumerate(_LAWS.items()):
        prompt = tuple(range(3 + place, 12 + 2 * place))
        spec = SessionSpec(name, 1, prompt, (), params, mode, 7 + place, method="draft_model")
        sessions[name] = DraftSession(spec, list(prompt), lambda _reply: None)
        method.open(sessions[name])
    rounds: list[dict[str, Proposal]] = []
    for script, count in _SCRIPT:
        for place, (name, session) in enumerate(sessions.items()):
            drafted = rounds[-1][name].token_ids if rounds else ()
            new = [drafted[at] if token < 0 and at < len(drafted) else abs(token) for at, token in enumerate(script)]
            session.report(DraftStep(1, session.committed_len, tuple(new), count + place % 2))
        found = method.propose(list(sessions.values()))
        rounds.append(dict(zip(sessions, found, strict=True)))
        blocks.check_integrity()
    for session in sessions.values():
        method.close(session)
    assert blocks.num_free_blocks == _NUM_BLOCKS
    return rounds


def test_plain_chains_are_drawn_there_and_all_proposals_are_those_of_the_host(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_drawn: list[int] = []
    draw = DeviceChains.draw

    def counted(self: DeviceChains, first_logits, starts):  # type: ignore[no-untyped-def]
        num_drawn.append(len(starts))
        return draw(self, first_logits, starts)

    monkeypatch.setattr(DeviceChains, "draw", counted)
    by_device, by_host = _proposals(loaded, draws=True), _proposals(loaded, draws=False)
    assert num_drawn == [2] * len(_SCRIPT), "the greedy session's and the drawn one's"
    for found, expected in zip(by_device, by_host, strict=True):
        for name, proposal in expected.items():
            assert (found[name].base_len, found[name].token_ids) == (proposal.base_len, proposal.token_ids), name
            assert found[name].laws == proposal.laws
            assert list(found[name].confidence) == pytest.approx(list(proposal.confidence), abs=1)
    assert any(len(proposals["drawn"].token_ids) > 4 for proposals in by_host)
