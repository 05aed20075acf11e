"""Chains drawn on the device against single forwards and the float64 race or law, one token at a time by the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import TINY_LLAMA, save_tiny_model

from outrider.drafting.growth.laws import sparse_law
from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from outrider.engine.sampling.chains import ChainDraws, ChainStart, DrawnToken, ModelForward
from outrider.engine.sampling.coupling import index_key
from outrider.engine.sampling.device_chains import DeviceChains, _Steps
from outrider.engine.sampling.device_draws import chains_on_host
from outrider.engine.sampling.laws import LogitsProcessor
from outrider.kernels.coupled_sample import reference
from outrider.shared.messages import LAW_TOTAL
from outrider.shared.sampling_params import SamplingParams
from tests.engine.sampling.law_cases import expect_equal_laws
from tests.kernels.sampling.sampling_cases import transforms
from tests.kernels.triton_device import device

_BLOCK_SIZE = 4
_GREEDY, _DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=0.75, top_k=20, top_p=0.875)
# Padding leaves attention's outputs as they were; whatever that is goes through the linears, and numpy warns.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@dataclass(frozen=True)
class _Session:
    prompt: list[int]
    block_ids: list[int]
    params: SamplingParams
    num_tokens: int
    has_laws: bool = False

    def draws(self) -> ChainDraws:
        keys = [index_key(99, len(self.prompt) + place) for place in range(self.num_tokens)]
        places = np.random.default_rng(len(self.prompt)).integers(LAW_TOTAL, size=self.num_tokens)
        return ChainDraws(self.params, np.array(keys, dtype=np.uint32), places if self.has_laws else None)

    def start(self) -> ChainStart:
        return ChainStart(len(self.prompt), self.block_ids, self.draws())


# Chains that end within a block, at its border and behind it, and one of a single token.
_SESSIONS = [
    _Session([7, 8, 9], [4, 1], _GREEDY, 4),
    _Session([11, 3, 5, 12, 40, 6], [2, 6, 7], _DRAWN, 5),
    _Session([30, 31], [3], SamplingParams(temperature=1.0), 1),
    _Session([20, 21, 22, 23], [5, 8], _DRAWN, 2),
    _Session([15, 9, 2, 33, 8], [9, 10], SamplingParams(temperature=1.25, top_p=0.875), 3, has_laws=True),
    _Session([1, 2, 3, 4, 5, 6, 7], [11, 12, 13], SamplingParams(temperature=0.75), 5, has_laws=True),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = save_tiny_model("LlamaConfig", TINY_LLAMA, tmp_path_factory.mktemp("llama"))
    return load_model(str(folder), dtype="bfloat16", device=device().type, attention_backend="triton")


def _prefilled(loaded: LoadedModel, *, graphs: bool = False) -> tuple[ModelRunner, torch.Tensor]:
    """A runner that has read the prompts, and the logits after each."""
    runner = ModelRunner(loaded, loaded.make_cache(14, _BLOCK_SIZE), graphs=graphs)
    rows = [SessionRows(session.prompt, 0, session.block_ids, 1) for session in _SESSIONS]
    return runner, runner.forward(build_batch(rows, _BLOCK_SIZE)).logits.clone()


def _by_the_host(loaded: LoadedModel) -> tuple[list[list[DrawnToken]], ModelRunner]:
    """Chains of single steps, and what they left in the cache."""
    runner, first_logits = _prefilled(loaded)
    chains = []
    for session, row in zip(_SESSIONS, first_logits, strict=True):
        logits, chain = row[None].to(device()), []
        for place in range(session.num_tokens):
            draw = _from_law if session.has_laws else _by_race
            chain.append(draw(logits, session.draws(), place))
            if place + 1 < session.num_tokens:
                rows = SessionRows([chain[-1].token_id], len(session.prompt) + place, session.block_ids, 1)
                logits = runner.forward(build_batch([rows], _BLOCK_SIZE)).logits.to(device())
        chains.append(chain)
    return chains, runner


def _by_race(logits: torch.Tensor, draws: ChainDraws, place: int) -> DrawnToken:
    """From logits [1, V]."""
    params = draws.params
    fields = transforms([(params.temperature, params.top_k, params.top_p, params.min_p)])
    keys = torch.from_numpy(draws.key_words[place : place + 1].view(np.int32)).to(device())
    races = -reference.race_values(logits, fields, keys)[0]
    token_id = int(torch.argmax(races))
    compared = logits[0].double() if params.greedy else races
    return DrawnToken(token_id, float(torch.softmax(compared, dim=0)[token_id]))


def _from_law(logits: torch.Tensor, draws: ChainDraws, place: int) -> DrawnToken:
    """From logits [1, V], by the host's law."""
    assert draws.law_places is not None
    row = logits[0].float().cpu().numpy()
    law = sparse_law(LogitsProcessor(draws.params, (), ()).log_weights(row, ()))
    rank = int(np.count_nonzero(np.cumsum(law.counts) <= draws.law_places[place]))
    return DrawnToken(law.token_ids[rank], law.counts[rank] / LAW_TOTAL, law)


def _expect(found: Sequence[Sequence[DrawnToken]], expected: Sequence[Sequence[DrawnToken]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert [drawn.token_id for drawn in mine] == [drawn.token_id for drawn in theirs]
        assert [drawn.share for drawn in mine] == pytest.approx([drawn.share for drawn in theirs], rel=1e-3)
        for mine_drawn, their_drawn in zip(mine, theirs, strict=True):
            assert (mine_drawn.law is None) == (their_drawn.law is None)
            if mine_drawn.law is not None and their_drawn.law is not None:
                expect_equal_laws(mine_drawn.law, their_drawn.law)


def _expect_caches_equal(runner: ModelRunner, other: ModelRunner) -> None:
    for ours, theirs in zip(runner.cache.layers, other.cache.layers, strict=True):
        assert all(torch.equal(mine, its) for mine, its in zip(ours, theirs, strict=True))


@pytest.mark.storm
def test_chains_and_caches_are_those_of_single_steps(loaded: LoadedModel) -> None:
    expected, by_host = _by_the_host(loaded)
    assert len({drawn.token_id for chain in expected for drawn in chain}) > 4
    assert {len(drawn.law.token_ids) > 1 for drawn in expected[-1] if drawn.law is not None} == {True}
    runner, first_logits = _prefilled(loaded)
    found = DeviceChains(ModelForward(runner)).draw(
        first_logits.to(device()), [session.start() for session in _SESSIONS]
    )
    _expect(found, expected)
    _expect_caches_equal(runner, by_host)
    # As in a captured graph: more rows and wider tables than the sessions need, used before.
    steps = _Steps(ModelForward(runner), 8, 4, with_laws=True)
    for num_steps in (1, 4):
        with torch.inference_mode():
            steps.begin(first_logits.to(device()), [session.start() for session in _SESSIONS])
            for _ in range(num_steps):
                steps.advance()
    _expect(chains_on_host(steps.drawn, [session.draws() for session in _SESSIONS]), expected)
    _expect_caches_equal(runner, by_host)


@pytest.mark.storm
def test_a_chain_ends_before_a_row_without_a_number(loaded: LoadedModel) -> None:
    runner, first_logits = _prefilled(loaded)
    first_logits[1], first_logits[4] = torch.nan, -torch.inf
    starts = [session.start() for session in _SESSIONS[1:]]
    chains = DeviceChains(ModelForward(runner)).draw(first_logits[1:].to(device()), starts)
    assert [len(chain) for chain in chains] == [0, 1, 2, 0, 5]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_chains_of_graphs_are_those_of_single_launches(loaded: LoadedModel) -> None:
    drawn = []
    for graphs in (False, True):
        runner, first_logits = _prefilled(loaded, graphs=graphs)
        chains = DeviceChains(ModelForward(runner))
        starts = [session.start() for session in _SESSIONS]
        drawn.append([chains.draw(first_logits.to(device()), starts) for _ in range(2)])
    assert drawn[0] == drawn[1]
