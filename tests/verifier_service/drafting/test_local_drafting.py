"""A verifier that drafts by itself: the same output as without, or the same law, whatever drafts, whoever else runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from outrider.drafting.session import DraftSession
from outrider.engine.certificate import Certificate
from outrider.engine.model.loaded import LoadedModel
from outrider.shared.messages import LocalDrafts, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.verifier_service.engine import VerifierEngine
from tests.grid.driver import Driver, Session
from tests.grid.heads import HEADS
from tests.grid.pools import CHUNKS, ROOMY_BLOCKS, Pool, Pools
from tests.verifier_service.acceptance.toy import SMALLEST_P_VALUE, chi_square_p_value
from tests.verifier_service.drafting.drafting_pair import (
    LAW_VOCAB_SIZE,
    NUM_SESSIONS,
    build_method,
    count_two_tokens,
)
from tests.verifier_service.drafting.spy_method import Spy, engine_with
from tests.verifier_service.engine_client import (
    PARAMS,
    PROMPT,
    EngineShape,
    generate,
    logprobs_of,
    make_spec,
    prompt_of,
    tokens_of,
)
from tests.verifier_service.engine_client import Session as EngineSession

COMBINED = ("eagle3+suffix", "draft_model+suffix")
NAMES = ("ngram", "suffix", "draft_model", *HEADS, *COMBINED)
TREES = ("draft_model", *HEADS, *COMBINED)
SHORT, WHOLE = 7, 1_000


@contextmanager
def drafting_pool(
    pools: Pools, names: Sequence[str], *, num_blocks: int = ROOMY_BLOCKS, prefill: str = "whole"
) -> Iterator[Pool]:
    pool = pools.start(CHUNKS[prefill], num_blocks, {name: build_method(name, pools) for name in names})
    try:
        yield pool
        pool.engine.check_integrity()  # after the last `close`
        assert pool.engine.blocks.num_free_blocks == num_blocks
    finally:
        pool.engine.stop()


def spec_of(key: int, params: SamplingParams, mode: SpeculationMode, prompt: tuple[int, ...]) -> SessionSpec:
    return SessionSpec(f"s{key}", 0, prompt, (), params, mode, stream_key=key)


def long_prompt(key: int) -> tuple[int, ...]:
    """Longer than what a proposal reads by the way, so that methods catch up in pieces."""
    return tuple(3 + (key * 7 + place * place) % (LAW_VOCAB_SIZE - 3) for place in range(100))


GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=48, ignore_eos=True)


def decode(pool: Pool, params: SamplingParams, local: LocalDrafts | None, run: int) -> list[Session]:
    sessions = [
        Session(spec_of(key, params, SpeculationMode.EXACT, long_prompt(key)), None, 0, run, local=local)
        for key in range(5)
    ]
    Driver(pool).run(sessions)
    assert [session.failure for session in sessions] == [""] * len(sessions)
    return sessions


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_method_gives_the_tokens_of_plain_decoding(pools: Pools, name: str, tree: bool) -> None:
    if tree and name not in TREES:
        pytest.skip(f"{name} has chains alone")
    num_accepted = 0
    with drafting_pool(pools, (name,)) as pool:
        for params in (GREEDY, SAMPLED):
            expected = [session.output for session in decode(pool, params, None, WHOLE)]
            for run in (SHORT, WHOLE):
                found = decode(pool, params, LocalDrafts(name, 4, tree), run)
                assert [session.output for session in found] == expected
                assert sum(session.num_draft_tokens for session in found) > 40
                num_accepted += sum(session.num_accepted_tokens for session in found)
    assert num_accepted > 0


@pytest.mark.parametrize(("num_blocks", "prefill"), [(14, "chunk16"), (24, "whole")])
def test_preemption_costs_no_token(pools: Pools, num_blocks: int, prefill: str) -> None:
    """Five sessions end at ten blocks each."""
    expected = [session.output for session in decode(pools.pool("whole", ROOMY_BLOCKS), SAMPLED, None, WHOLE)]
    for name in ("draft_model", "eagle3"):
        with drafting_pool(pools, (name,), num_blocks=num_blocks, prefill=prefill) as pool:
            found = decode(pool, SAMPLED, LocalDrafts(name, 4), WHOLE)
            assert pool.num_preemptions > 0
        assert [session.output for session in found] == expected
        assert sum(session.num_draft_tokens for session in found) > 0


def test_methods_may_take_turns_within_a_session(pools: Pools) -> None:
    expected = [session.output for session in decode(pools.pool("whole", ROOMY_BLOCKS), GREEDY, None, WHOLE)]
    with drafting_pool(pools, NAMES) as pool:
        drafted: dict[str, int] = {}
        for key, right in enumerate(expected):
            with EngineSession(pool.engine, spec_of(key, GREEDY, SpeculationMode.EXACT, long_prompt(key))) as session:
                output: list[int] = []
                while len(output) < GREEDY.max_tokens:
                    name = NAMES[len(output) % len(NAMES)]
                    for commit in session.step(len(output), max_new_tokens=6, epoch=0, local=LocalDrafts(name, 3)):
                        output += commit.token_ids
                        drafted[name] = drafted.get(name, 0) + commit.num_draft_tokens
            assert output == right
    assert min(drafted.values()) > 0


@pytest.mark.parametrize("name", ["ngram", "draft_model"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_prediction_changes_rounds_and_no_token(pools: Pools, params: SamplingParams, name: str) -> None:
    """Right, edited in two places, wrong, and all of these beside sessions without one."""
    expected = [session.output for session in decode(pools.pool("whole", ROOMY_BLOCKS), params, None, WHOLE)]
    right = expected[0]
    edited = [*right[:10], 5, 5, 5, *right[14:30], *right[34:]]
    predictions = [right, edited, [3, 4] * 30, expected[1], []]
    with drafting_pool(pools, (name,)) as pool:
        found = [
            Session(
                replace(
                    spec_of(0, params, SpeculationMode.EXACT, long_prompt(0)), predicted_token_ids=tuple(prediction)
                ),
                None,
                0,
                WHOLE,
                local=LocalDrafts(name, 6),
            )
            for prediction in predictions
        ]
        Driver(pool).run(found)
    assert [session.output for session in found] == [right] * len(found)
    accepted = [session.num_accepted_tokens for session in found]
    assert accepted[0] >= 6 * len(right) // 7 - 6
    assert accepted[1] >= 12
    wrong = [session.num_draft_tokens - session.num_accepted_tokens for session in found]
    assert wrong[2] <= wrong[4] + 3 * 6


@pytest.mark.parametrize("name", ["ngram", "draft_model", "eagle3", "draft_model and a prediction"])
def test_rejection_mode_keeps_the_targets_law(pools: Pools, law_of_two: np.ndarray, name: str) -> None:
    """The first token has no draft before it, the second is the first of a drafted round."""
    name, *further = name.split(" and ")
    predicted = tuple(map(int, divmod(int(law_of_two.argmax()), LAW_VOCAB_SIZE))) if further else ()
    with drafting_pool(pools, (name,)) as pool:
        counts, _, num_accepted = count_two_tokens(
            pool,
            7,
            lambda spec: Session(
                replace(spec, predicted_token_ids=predicted), None, 0, WHOLE, local=LocalDrafts(name, 3)
            ),
        )
    assert num_accepted > NUM_SESSIONS // 20
    assert chi_square_p_value(counts, law_of_two) > SMALLEST_P_VALUE


SPY = LocalDrafts("spy", 4)


def test_a_method_is_given_the_hidden_states_that_transformers_computes(
    loaded: LoadedModel, certificate: Certificate, checkpoint: Path, truth: Callable
) -> None:
    right = tokens_of(truth("greedy", 0))
    spy = Spy(lambda session: right[session.committed_len : session.committed_len + 2], layers=(1, 2))
    with engine_with(spy, loaded, certificate, EngineShape(prefill_chunk_size=16, prefix_caching=False)) as engine:
        commits = generate(engine, make_spec(PROMPT, PARAMS["greedy"]), free_run=9, local=SPY)
    assert tokens_of(commits) == right
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([[*PROMPT, *right]]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[1][0], states[2][0]], dim=1)
    assert len(spy.rows) > 10
    for length, rows in spy.rows.items():
        assert torch.allclose(rows, expected[: length - 1], atol=1e-4)


def test_sessions_of_one_forward_are_drafted_for_together(
    loaded: LoadedModel, certificate: Certificate, truth: Callable
) -> None:
    rights = {prompt_of(seed): tokens_of(truth("greedy", seed)) for seed in range(4)}
    spy = Spy(lambda session: rights[session.spec.prompt_token_ids][session.committed_len :][:1])
    with engine_with(spy, loaded, certificate) as engine, ThreadPoolExecutor(4) as pool:
        specs = [make_spec(prompt, PARAMS["greedy"]) for prompt in rights]
        found = list(pool.map(lambda spec: generate(engine, spec, free_run=1000, local=SPY), specs))
    assert [tokens_of(commits) for commits in found] == list(rights.values())
    assert max(spy.batches) == 4
    assert spy.num_open == 0


def test_what_a_round_cannot_use_is_not_asked_for(
    loaded: LoadedModel, certificate: Certificate, truth: Callable
) -> None:
    right = tokens_of(truth("greedy", 0))
    asked: list[int] = []

    def guess(session: DraftSession) -> Sequence[int]:
        assert session.step is not None
        asked.append(session.step.num_draft_tokens)
        return right[session.committed_len : session.committed_len + session.step.num_draft_tokens]

    with engine_with(Spy(guess), loaded, certificate) as engine:
        commits = generate(engine, make_spec(PROMPT, PARAMS["greedy"]), free_run=1000, local=SPY)
    # 40 tokens: one of the prompt's own round, seven rounds of five, and four that are left.
    assert asked == [4] * 7 + [3]
    assert [len(commit.token_ids) for commit in commits] == [1] + [5] * 7 + [4]
    assert [commit.timings.draft_us > 0 for commit in commits] == [False] + [True] * 8
    assert logprobs_of(commits) == logprobs_of(truth("greedy", 0))


@pytest.mark.parametrize("place", ["open", "advance", "propose"])
def test_a_method_that_fails_ends_nobodys_session(
    loaded: LoadedModel,
    certificate: Certificate,
    truth: Callable,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    spy = Spy(lambda session: (5,))
    monkeypatch.setattr(spy, place, fail)
    with caplog.at_level(logging.CRITICAL), engine_with(spy, loaded, certificate) as engine:
        commits = generate(engine, make_spec(PROMPT, PARAMS["sampled"]), free_run=1000, local=SPY)
    assert tokens_of(commits) == tokens_of(truth("sampled", 0))
    assert sum(commit.num_draft_tokens for commit in commits) == 0


def test_nor_does_a_report_that_fails(
    loaded: LoadedModel,
    certificate: Certificate,
    truth: Callable,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(DraftSession, "report", fail)
    with caplog.at_level(logging.CRITICAL), engine_with(Spy(lambda session: (5,)), loaded, certificate) as engine:
        commits = generate(engine, make_spec(PROMPT, PARAMS["sampled"]), free_run=1000, local=SPY)
    assert tokens_of(commits) == tokens_of(truth("sampled", 0))


def test_a_method_that_is_not_there_is_passed_over(engine: VerifierEngine, truth: Callable) -> None:
    commits = generate(engine, make_spec(PROMPT, PARAMS["sampled"]), free_run=1000, local=SPY)
    assert tokens_of(commits) == tokens_of(truth("sampled", 0))
    assert sum(commit.timings.draft_us for commit in commits) == 0


def test_reading_a_prompt_is_part_of_what_drafting_takes(
    loaded: LoadedModel, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sessions of the forward wait for it, so the policy must hear of it."""
    spy = Spy(lambda session: (5,))
    reading_s = 0.05
    monkeypatch.setattr(spy, "advance", lambda _session: bool(time.sleep(reading_s)))
    with engine_with(spy, loaded, certificate) as engine:
        commits = generate(engine, make_spec(PROMPT, PARAMS["greedy"]), free_run=1000, local=SPY)
    first, *others = [commit.timings for commit in commits if commit.timings.draft_us]
    assert reading_s <= first.draft_us * 1e-6 <= first.total_us * 1e-6
    assert sorted(other.draft_us for other in others)[len(others) // 2] * 1e-6 < reading_s


def test_a_session_that_is_taken_back_goes_on_from_there(
    loaded: LoadedModel, certificate: Certificate, truth: Callable
) -> None:
    right = tokens_of(truth("sampled", 0))
    seen: list[tuple[int, ...]] = []

    def guess(session: DraftSession) -> Sequence[int]:
        seen.append(tuple(session.output_token_ids))
        return right[session.committed_len : session.committed_len + 2]

    with (
        engine_with(Spy(guess), loaded, certificate) as engine,
        EngineSession(engine, make_spec(PROMPT, PARAMS["sampled"])) as session,
    ):
        session.step(0, max_new_tokens=20, local=SPY)
        again = session.step(6, max_new_tokens=1000, local=SPY)
    assert right[:6] + tokens_of(again) == right
    assert all(output == right[: len(output)] for output in seen)
    assert min(len(output) for output in seen[-8:]) < 20
