"""Chains drawn on the device against single forwards and the float64 race, one token at a time by the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import TINY_LLAMA, save_tiny_model

from engine.batch import SessionRows, build_batch
from engine.coupling import index_key
from engine.device_chains import ChainStart, DeviceChains, DrawnToken, _Steps
from engine.model import LoadedModel, load_model
from engine.runner import ModelRunner
from kernels.coupled_sample import reference
from shared.sampling_params import SamplingParams
from tests.kernels.sampling_cases import transforms
from tests.kernels.triton_device import device

_BLOCK_SIZE = 4
_GREEDY, _DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=0.75, top_k=20, top_p=0.875)
# Padding leaves attention's outputs as they were; whatever that is goes through the linears, and numpy warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@dataclass(frozen=True)
class _Session:
    prompt: list[int]
    block_ids: list[int]
    params: SamplingParams
    num_tokens: int

    def start(self) -> ChainStart:
        keys = [index_key(99, len(self.prompt) + place) for place in range(self.num_tokens)]
        return ChainStart(len(self.prompt), self.block_ids, self.params, np.array(keys, dtype=np.uint32))


# Chains that end within a block, at its border and behind it, and one of a single token.
_SESSIONS = [
    _Session([7, 8, 9], [4, 1], _GREEDY, 4),
    _Session([11, 3, 5, 12, 40, 6], [2, 6, 7], _DRAWN, 5),
    _Session([30, 31], [3], SamplingParams(temperature=1.0), 1),
    _Session([20, 21, 22, 23], [5, 8], _DRAWN, 2),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = save_tiny_model("LlamaConfig", TINY_LLAMA, tmp_path_factory.mktemp("llama"))
    return load_model(str(folder), dtype="bfloat16", device=device().type, attention_backend="triton")


def _prefilled(loaded: LoadedModel) -> tuple[ModelRunner, torch.Tensor]:
    """A runner that has read the prompts, and the logits after each."""
    runner = ModelRunner(loaded, loaded.make_cache(9, _BLOCK_SIZE))
    rows = [SessionRows(session.prompt, 0, session.block_ids, 1) for session in _SESSIONS]
    return runner, runner.forward(build_batch(rows, _BLOCK_SIZE)).logits.clone()


def _by_the_host(loaded: LoadedModel) -> tuple[list[list[DrawnToken]], ModelRunner]:
    """Chains of single steps, and what they left in the cache."""
    runner, first_logits = _prefilled(loaded)
    chains = []
    for session, row in zip(_SESSIONS, first_logits, strict=True):
        params, start = session.params, session.start()
        fields = transforms([(params.temperature, params.top_k, params.top_p, params.min_p)])
        logits, chain = row[None].to(device()), []
        for place in range(session.num_tokens):
            keys = torch.from_numpy(start.key_words[place : place + 1].view(np.int32)).to(device())
            races = -reference.race_values(logits, fields, keys)[0]
            token_id = int(torch.argmax(races))
            law = logits[0].double() if params.greedy else races
            chain.append(DrawnToken(token_id, float(torch.softmax(law, dim=0)[token_id])))
            if place + 1 < session.num_tokens:
                rows = SessionRows([token_id], start.position + place, session.block_ids, 1)
                logits = runner.forward(build_batch([rows], _BLOCK_SIZE)).logits.to(device())
        chains.append(chain)
    return chains, runner


def _expect(found: Sequence[Sequence[DrawnToken]], expected: Sequence[Sequence[DrawnToken]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert [drawn.token_id for drawn in mine] == [drawn.token_id for drawn in theirs]
        assert [drawn.share for drawn in mine] == pytest.approx([drawn.share for drawn in theirs], rel=1e-3)


def _expect_caches_equal(runner: ModelRunner, other: ModelRunner) -> None:
    for ours, theirs in zip(runner.cache.layers, other.cache.layers, strict=True):
        assert all(torch.equal(mine, its) for mine, its in zip(ours, theirs, strict=True))


def test_chains_and_caches_are_those_of_single_steps(loaded: LoadedModel) -> None:
    expected, by_host = _by_the_host(loaded)
    assert len({drawn.token_id for chain in expected for drawn in chain}) > 4
    runner, first_logits = _prefilled(loaded)
    found = DeviceChains(runner).draw(first_logits.to(device()), [session.start() for session in _SESSIONS])
    _expect(found, expected)
    _expect_caches_equal(runner, by_host)
    # As in a captured graph: more rows and wider tables than the sessions need, used before.
    steps = _Steps(runner, 6, 4)
    for num_steps in (1, 4):
        with torch.inference_mode():
            steps.begin(first_logits.to(device()), [session.start() for session in _SESSIONS])
            for _ in range(num_steps):
                steps.advance()
            tokens, shares = steps.drawn()
    found = [
        [DrawnToken(*pair) for pair in zip(tokens[:count, row].tolist(), shares[:count, row].tolist(), strict=True)]
        for row, count in enumerate(session.num_tokens for session in _SESSIONS)
    ]
    _expect(found, expected)
    _expect_caches_equal(runner, by_host)


def test_a_chain_ends_before_a_row_without_a_number(loaded: LoadedModel) -> None:
    runner, first_logits = _prefilled(loaded)
    first_logits[1] = torch.nan
    chains = DeviceChains(runner).draw(first_logits[1:3].to(device()), [session.start() for session in _SESSIONS[1:3]])
    assert [len(chain) for chain in chains] == [0, 1]
