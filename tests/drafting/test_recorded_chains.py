"""Chains that run as recorded programs propose what the same heads and models propose when they grow token by token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from outrider.drafting.methods.draft_model import DraftModelNet, draft_model_method
from outrider.drafting.methods.growing import GrowingMethod
from outrider.drafting.session import DraftSession
from outrider.engine.attention.block_manager import BlockManager
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from outrider.engine.sampling.cpu_chains import key_of, model_chains
from outrider.shared.messages import DraftStep, Proposal, SessionSpec
from tests.drafting.drawn_cases import LAWS, NUM_PLAIN, counted, expect_equal_rounds, prompt_at
from tests.drafting.head_cases import BLOCKS, RECORDED, WIDE, Case, Target

NUM_ROUNDS = 40


def _of_a_model(loaded: LoadedModel, *, draws: bool) -> tuple[GrowingMethod, BlockManager, Any]:
    blocks = BlockManager(400, 16)
    runner = ModelRunner(loaded, loaded.make_cache(400, 16), graphs=True)
    chains = model_chains(runner) if draws else None
    return (
        draft_model_method(DraftModelNet(runner, blocks, prefill_chunk_size=32, chains=chains), "tiny"),
        blocks,
        chains,
    )


def test_chains_have_few_sizes_that_are_little_larger() -> None:
    """Each size is recorded once, which takes as long as many chains."""
    keys = set()
    for num_sessions in range(1, 17):
        for rows_each in range(1, 7):
            lens = [rows_each] * (num_sessions - 1) + [1]
            num_rows, padded = key_of(lens) or (0, 0)
            assert num_sessions <= padded <= 1.5 * num_sessions
            assert max(sum(lens), padded) <= num_rows <= max(2.25 * sum(lens), padded)
            keys.add((num_rows, padded))
    assert len(keys) <= 8 * 5
    assert key_of([1] * 193) is None
    assert key_of([2] * 96) == (192, 96)


def test_a_draft_models_chains_are_those_that_grow() -> None:
    loaded = load_model("models/demo-draft", dtype="bfloat16")
    rounds: list[list[dict[str, Proposal]]] = []
    for draws in (True, False):
        method, blocks, chains = _of_a_model(loaded, draws=draws)
        rng, sessions, drafted = random.Random(8), {}, dict[str, tuple[int, ...]]()
        for place, (name, (params, mode)) in enumerate(LAWS.items()):
            prompt = tuple(prompt_at(place))
            spec = SessionSpec(name, 1, prompt, (), params, mode, 7 + place, method="draft_model")
            sessions[name] = DraftSession(spec, list(prompt), lambda _reply: None)
            method.open(sessions[name])
        rounds.append([])
        for number in range(NUM_ROUNDS):
            asked = list(sessions) if number % 6 == 0 else rng.sample(list(sessions), rng.choice((1, 1, 2, 4)))
            for name in asked:
                kept = drafted.get(name, ())[: rng.randrange(4)]
                committed = (*kept, *(rng.randrange(3, 400) for _ in range(rng.choice((1, 1, 1, 40)))))
                sessions[name].report(DraftStep(1, sessions[name].committed_len, committed, rng.randrange(1, 5)))
            found = method.propose([sessions[name] for name in asked])
            blocks.check_integrity()
            rounds[-1].append(dict(zip(asked, found, strict=True)))
            drafted |= {name: proposal.token_ids for name, proposal in rounds[-1][-1].items()}
        for session in sessions.values():
            method.close(session)
        assert blocks.num_free_blocks == blocks.num_blocks
        if draws:
            assert len(chains._runs) >= 2
            assert not chains._is_refused
    expect_equal_rounds(*rounds)


def _proposals(case: Case, seed: int) -> list[dict[str, Proposal]]:
    """Rounds of changing sessions that keep some of their drafts, or none, or commit more tokens than a chain takes."""
    rng = random.Random(seed)
    sessions: dict[str, tuple[DraftSession, Target]] = {}
    for place, (name, (params, mode)) in enumerate(LAWS.items()):
        prompt = prompt_at(place)
        sessions[name] = case.open(prompt, params, mode, session_id=name), Target(case, len(prompt), place)
    rounds: list[dict[str, Proposal]] = []
    drafted: dict[str, tuple[int, ...]] = {}
    reported: set[str] = set()
    for number in range(NUM_ROUNDS):
        asked = list(sessions) if number % 6 == 0 else rng.sample(list(sessions), rng.choice((1, 1, 2, 4)))
        for name in asked:
            session, target = sessions[name]
            kept = list(drafted.get(name, ()))[: rng.randrange(4)]
            committed = [*kept, *(rng.randrange(3, 20) for _ in range(rng.choice((1, 1, 1, 40)) if reported else 1))]
            first = session.committed_len - 1 if name in reported else -session.prompt_len
            case.report(session, target, committed, first, rng.randrange(1, 5))
            reported.add(name)
        found = case.method.propose([sessions[name][0] for name in asked])
        case.paged.blocks.check_integrity()
        rounds.append(dict(zip(asked, found, strict=True)))
        drafted |= {name: proposal.token_ids for name, proposal in rounds[-1].items()}
    for session, _target in sessions.values():
        case.method.close(session)
    assert case.paged.blocks.num_free_blocks == case.paged.blocks.num_blocks
    return rounds


# Of float32 linears, torch's own, programs are interrupted.
@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.bfloat16) for kind in (*RECORDED, *BLOCKS)), ("eagle3", torch.float32)]
)
def test_recorded_chains_are_those_that_grow(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = counted(monkeypatch)
    recording, growing = (Case(kind, decoder=WIDE, dtype=dtype, draws=draws) for draws in (True, False))
    by_program = _proposals(recording, 3)
    assert len(taken) > NUM_PLAIN * 5
    num_taken = len(taken)
    expect_equal_rounds(by_program, _proposals(growing, 3))
    assert len(taken) == num_taken, "the others grow"
    chains: Any = recording.method._net._chains  # type: ignore[attr-defined]
    assert not chains._is_refused
    assert len(chains._runs) >= 2
