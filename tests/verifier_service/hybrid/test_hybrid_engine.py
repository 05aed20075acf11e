"""The verifier's engine on a tiny Qwen3.5, whose recurrent states cannot be cut back: exact mode gives one output.

Freed slots are NaN (engine_client), so that a session that reads another's state has no output at all.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from outrider.engine.certificate import Certificate
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.recurrent.table import StateTable
from outrider.engine.run.runner import ModelRunner
from outrider.shared.messages import Proposal
from outrider.verifier_service.engine import VerifierEngine
from tests.verifier_service.drafts import (
    drafts_for,
    faulty_draft,
    generated_alike,
    oracle_draft,
    tree_draft,
)
from tests.verifier_service.engine_client import (
    NUM_TOKENS,
    PARAMS,
    PROMPT,
    VOCAB_SIZE,
    Draft,
    EngineShape,
    Session,
    generate,
    logprobs_of,
    make_spec,
    prompt_of,
    running_engine,
    tokens_of,
)

KINDS = ("random", "oracle", "long oracle", "faulty", "late", "tree")


def test_plain_decoding_equals_transformers(truth: Callable, checkpoint: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    for seed in range(3):
        prompt = torch.tensor([prompt_of(seed)])
        with torch.inference_mode():
            expected = model.generate(prompt, do_sample=False, max_new_tokens=NUM_TOKENS)[0, prompt.shape[1] :]
        assert tokens_of(truth("greedy", seed)) == tuple(expected.tolist())


@pytest.mark.parametrize(("kind", "name"), list(zip(KINDS, itertools.cycle(sorted(PARAMS)), strict=False)))
def test_any_draft_gives_the_same_tokens_and_logprobs(
    engine: VerifierEngine, truth: Callable, kind: str, name: str
) -> None:
    commits = generated_alike(engine, truth, kind, name)
    if "oracle" in kind:
        accepted = sum(commit.num_accepted_tokens for commit in commits)
        assert accepted == sum(commit.num_draft_tokens for commit in commits)


def by_turns(truth: tuple[int, ...], counts: tuple[int, ...]) -> Draft:
    """Right drafts of these lengths in turn, 0: none; every other one ends with a wrong token."""
    turn = itertools.count()

    def draft(output: tuple[int, ...]) -> Proposal | None:
        index = next(turn)
        tokens = list(truth[len(output) : len(output) + counts[index % len(counts)]])
        if index % 2 and tokens:
            tokens[-1] = (tokens[-1] + 1) % VOCAB_SIZE
        return Proposal(len(output), tuple(tokens), "turns") if tokens else None

    return draft


@pytest.mark.parametrize("counts", [(4, 0), (4, 1, 3, 0), (0, 0, 2), (1,)])
def test_lengths_of_drafts_may_change_and_drafts_may_fail_to_come(
    engine: VerifierEngine, truth: Callable, counts: tuple[int, ...]
) -> None:
    expected = truth("sampled", 0)
    commits = generate(engine, make_spec(PROMPT, PARAMS["sampled"]), by_turns(tokens_of(expected), counts))
    assert tokens_of(commits) == tokens_of(expected)
    assert logprobs_of(commits) == logprobs_of(expected)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6])
def test_short_prompts_are_no_verifications(engine: VerifierEngine, length: int) -> None:
    """Of as many tokens as a verification has rows."""
    spec = make_spec(prompt_of(length, length), replace(PARAMS["greedy"], max_tokens=12))
    expected = generate(engine, spec)
    right = tokens_of(expected)
    for draft in (oracle_draft(right, 4), tree_draft(right, length)):
        assert logprobs_of(generate(engine, spec, draft)) == logprobs_of(expected)


@pytest.mark.parametrize(("chunk", "budget"), [(1, 41), (5, 8), (37, 8)])
def test_chunks_and_row_budgets(
    loaded: LoadedModel, certificate: Certificate, truth: Callable, chunk: int, budget: int
) -> None:
    shape = EngineShape(prefill_chunk_size=chunk, max_num_batched_tokens=budget, block_size=5)
    with running_engine(loaded, certificate, shape) as engine:
        right = tokens_of(truth("hot", 0))
        assert tokens_of(generate(engine, make_spec(PROMPT, PARAMS["hot"]), tree_draft(right, 6))) == right


def test_a_draft_longer_than_the_log_is_cut(loaded: LoadedModel, certificate: Certificate, truth: Callable) -> None:
    with running_engine(loaded, certificate, EngineShape(num_log_rows=3)) as engine:
        right = tokens_of(truth("greedy", 0))
        commits = generate(engine, make_spec(PROMPT, PARAMS["greedy"]), oracle_draft(right, 9))
        assert tokens_of(commits) == right
        assert max(commit.num_draft_tokens for commit in commits) == 2


def together(engine: VerifierEngine, truth: Callable, num_sessions: int) -> None:
    """Sessions of every draft and prompt at once; each has the output that it has alone."""

    def run(seed: int) -> tuple[list, list]:
        name = sorted(PARAMS)[seed % len(PARAMS)]
        expected = truth(name, seed % 2)
        draft = list(drafts_for(tokens_of(expected)).values())[seed % len(KINDS)]
        return generate(engine, make_spec(prompt_of(seed % 2), PARAMS[name]), draft), expected

    for seed in range(4):
        run(seed)  # what is right must be known before they meet
    with ThreadPoolExecutor(5) as executor:
        for found, expected in executor.map(run, range(num_sessions)):
            assert tokens_of(found) == tokens_of(expected)
            assert logprobs_of(found) == logprobs_of(expected)


def test_sessions_beside_each_other_and_in_freed_slots(
    loaded: LoadedModel, certificate: Certificate, truth: Callable
) -> None:
    """Nine sessions, of which three fit at a time: a running one takes two slots."""
    with running_engine(loaded, certificate, EngineShape(num_slots=6)) as engine:
        together(engine, truth, 9)


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(30, 40), (200, 3)])
def test_preemption_for_blocks_or_for_slots_costs_no_token(
    loaded: LoadedModel, certificate: Certificate, truth: Callable, num_blocks: int, num_slots: int
) -> None:
    shape = EngineShape(num_blocks=num_blocks, num_slots=num_slots, prefill_chunk_size=16)
    with running_engine(loaded, certificate, shape) as engine:
        together(engine, truth, 5)
        assert engine.rounds.scheduler.num_preemptions > 0


def test_lost_replies(engine: VerifierEngine, truth: Callable) -> None:
    """One round, three rounds, and all of them repeated."""
    expected = truth("sampled", 0)
    right, order = tokens_of(expected), random.Random(2)
    draft = faulty_draft(right, 4)
    with Session(engine, make_spec(PROMPT, PARAMS["sampled"])) as session:
        ends = [0]
        while ends[-1] < len(right):
            for back in (1, 3, len(ends)):
                if order.random() < (0.3 if back == 1 else 0.1) and len(ends) > back:
                    del ends[-back:]
            (commit,) = session.step(ends[-1], draft(right[: ends[-1]]))
            assert commit.token_ids == right[ends[-1] : commit.end]
            ends.append(commit.end)


def test_one_lost_reply_costs_no_second_prefill(loaded: LoadedModel, certificate: Certificate, truth: Callable) -> None:
    right = tokens_of(truth("greedy", 0))
    with (
        running_engine(loaded, certificate, EngineShape(block_size=64)) as engine,
        Session(engine, make_spec(PROMPT, PARAMS["greedy"])) as session,
    ):
        end = session.step(0)[0].end
        for draft in (oracle_draft(right, 4), tree_draft(right, 3), oracle_draft(right, 1)):
            session.step(end, draft(right[:end]))
            (again,) = session.step(end, draft(right[:end]))
            (only,) = engine._sessions.values()
            assert only.state is not None
            assert only.state.base == len(PROMPT) + end - 1, "the state before the round is still there"
            end = again.end


def test_a_session_taken_over_by_another_engine(loaded: LoadedModel, certificate: Certificate, truth: Callable) -> None:
    right = tokens_of(truth("hot", 0))
    with running_engine(loaded, certificate) as engine:
        for cut in (1, 13, len(right) - 1):
            spec = make_spec(PROMPT, PARAMS["hot"], committed=right[:cut], epoch=2)
            assert tokens_of(generate(engine, spec, faulty_draft(right, cut))) == right[cut:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_cache_hit_changes_no_bit(
    loaded: LoadedModel, certificate: Certificate, truth: Callable, kind: str
) -> None:
    """The state at the end of the prompt's last full block is kept, whatever drafts; block 4, prompt 37."""
    expected = truth("greedy", 0)
    with running_engine(loaded, certificate) as engine:
        for expected_hit in (0, 36, 36):
            draft = drafts_for(tokens_of(expected))[kind]
            commits = generate(engine, make_spec(PROMPT, PARAMS["greedy"]), draft)
            assert commits[0].num_cached_tokens == expected_hit
            assert tokens_of(commits) == tokens_of(expected)
            assert logprobs_of(commits) == logprobs_of(expected)


def test_prefixes_are_found_where_a_state_was_kept(
    loaded: LoadedModel, certificate: Certificate, truth: Callable
) -> None:
    """Every 8 positions and at the prompt's end (36); the next turn of a chat goes on from the output's states."""
    right = tokens_of(truth("greedy", 0))
    with running_engine(loaded, certificate) as engine:
        engine.rounds.scheduler.snapshot_interval = 8
        generate(engine, make_spec(PROMPT, PARAMS["greedy"]), faulty_draft(right, 3))
        short = replace(PARAMS["greedy"], max_tokens=3)
        other = (3, 4, 5)
        for length, hit in ((7, 0), (8, 8), (9, 8), (23, 16), (24, 24), (35, 32), (36, 36), (37, 36)):
            spec = make_spec((*PROMPT[:length], *other), short)
            with running_engine(loaded, certificate, EngineShape(prefix_caching=False)) as alone:
                expected = generate(alone, spec)
            found = generate(engine, spec, oracle_draft(tokens_of(expected), 2))
            assert found[0].num_cached_tokens == hit, length
            assert logprobs_of(found) == logprobs_of(expected)
        turn = make_spec((*PROMPT, *right, *other), short)
        (first, *_) = generate(engine, turn)
        assert first.num_cached_tokens == 72, "the last interval's end in 37 and 40 tokens"


def test_no_hit_without_the_state_or_without_the_block(
    loaded: LoadedModel, certificate: Certificate, truth: Callable
) -> None:
    expected = truth("greedy", 0)
    for shape in (EngineShape(num_slots=3), EngineShape(num_blocks=40)):
        with running_engine(loaded, certificate, shape) as engine:
            for seed in (0, 1, 2, 0):  # each takes the memory of the one before
                commits = generate(engine, make_spec(prompt_of(seed), PARAMS["greedy"]))
                assert commits[0].num_cached_tokens == 0
            assert logprobs_of(commits) == logprobs_of(expected)


def test_a_failed_forward_frees_its_slots(
    engine: VerifierEngine, truth: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = tokens_of(truth("greedy", 0))
    forward = ModelRunner.forward

    def failing(*arguments: object, **options: object) -> object:
        forward(*arguments, **options)  # type: ignore[arg-type]
        raise RuntimeError("out of luck")

    with Session(engine, make_spec(PROMPT, PARAMS["greedy"])) as session:
        end = session.step(0)[0].end
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "forward", failing)
            with pytest.raises(RuntimeError):
                session.step(end, Proposal(end, (5, 6), "x"))
        engine.check_integrity()
        assert engine.states is not None
        assert engine.states.num_free_slots == engine.states.num_slots
        assert session.step(end, oracle_draft(right)(right[:end]))[0].token_ids == right[end : end + 5]


# ---- what these tests must catch ----


def forgets_accepted_drafts(table: StateTable, state: object, base: int, kept: list[int]) -> None:
    right_settle(table, state, base, [0] * len(kept))  # type: ignore[arg-type]


right_settle = StateTable.settle


def test_another_row_of_the_log_is_caught(
    engine: VerifierEngine, truth: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = truth("greedy", 0)
    monkeypatch.setattr(StateTable, "settle", forgets_accepted_drafts)
    commits = generate(engine, make_spec(PROMPT, PARAMS["greedy"]), oracle_draft(tokens_of(expected)))
    assert logprobs_of(commits) != logprobs_of(expected)
