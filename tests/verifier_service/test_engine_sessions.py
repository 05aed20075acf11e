"""The verifier's engine on a real tiny Llama: repeated and refused steps, stops, limits, and what closing frees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from outrider.engine.certificate import Certificate
from outrider.engine.model.loaded import LoadedModel
from outrider.shared import wire
from outrider.shared.errors import CommitRefused, ExactModeRefused, InvalidRequest, Overloaded
from outrider.shared.messages import LAW_TOTAL, FinishReason, Proposal, SparseLaw
from outrider.shared.sampling_params import Grammar, GrammarKind, SamplingParams, SpeculationMode
from outrider.verifier_service.engine import VerifierEngine
from outrider.verifier_service.reload.served_target import ServedTarget
from outrider.verifier_service.server import VerifierServicer
from tests.verifier_service.drafts import faulty_draft, oracle_draft, random_draft, tree_draft
from tests.verifier_service.engine_client import (
    EOS_ID,
    NUM_TOKENS,
    PARAMS,
    PROMPT,
    VOCAB_SIZE,
    EngineShape,
    Session,
    finish_of,
    generate,
    make_spec,
    prompt_of,
    running_engine,
    tokens_of,
)


@pytest.mark.parametrize("mode", SpeculationMode)
def test_a_repeated_step_is_idempotent(engine: VerifierEngine, mode: SpeculationMode) -> None:
    params = replace(PARAMS["sampled"], num_prompt_logprobs=0)
    law = SparseLaw((5, 6, 7), (LAW_TOTAL // 2, LAW_TOTAL // 4, LAW_TOTAL // 4))
    with Session(engine, make_spec(PROMPT, params, mode)) as session:
        output: tuple[int, ...] = ()
        for _ in range(6):
            proposal = Proposal(len(output), (5, 6, 7), "test", laws=(law,) * 3)
            first, again = (session.step(len(output), proposal)[0] for _ in range(2))
            assert (first.token_ids, first.base_len, first.logprobs, first.origins) == (
                again.token_ids,
                again.base_len,
                again.logprobs,
                again.origins,
            )
            assert first.prompt_logprobs == again.prompt_logprobs, "the reply that was lost may have been the first"
            output += first.token_ids
        anew = session.step(0, Proposal(0, (5, 6, 7), "test", laws=(law,) * 3))[0]
        assert anew.token_ids == output[: anew.end]


def test_a_session_taken_over_by_another_engine_goes_on_with_the_same_tokens(
    loaded: LoadedModel, certificate: Certificate, truth: Callable
) -> None:
    for name in sorted(PARAMS):
        right = tokens_of(truth(name, 0))
        with running_engine(loaded, certificate) as engine:
            for cut in (1, 13, len(right) - 1):
                spec = make_spec(PROMPT, PARAMS[name], committed=right[:cut], epoch=2)
                assert tokens_of(generate(engine, spec, faulty_draft(right, cut))) == right[cut:]


def test_old_epochs_and_gaps_are_refused_and_the_peer_goes_on(engine: VerifierEngine, truth: Callable) -> None:
    right = tokens_of(truth("greedy", 0))
    spec = make_spec(PROMPT, PARAMS["greedy"], epoch=5)
    with Session(engine, spec) as session, Session(engine, spec) as peer:
        assert peer.step(0)[0].token_ids == right[:1]
        for epoch in (4, 6):
            with pytest.raises(CommitRefused):
                session.step(0, epoch=epoch)
        with pytest.raises(InvalidRequest):
            session.step(1)
        with pytest.raises(InvalidRequest):
            session.step(0, Proposal(0, (VOCAB_SIZE,), "broken"))
        assert peer.step(1)[0].token_ids == right[1:2]
        assert session.step(0)[0].token_ids == right[:1]


def test_a_session_that_cannot_go_on_ends_alone(engine: VerifierEngine, truth: Callable) -> None:
    """It comes with tokens that nothing may follow: that session fails, the one in its batch does not."""
    hopeless = SamplingParams(temperature=1.0, seed=1, allowed_token_ids=(4,), bad_words=((4, 4),), ignore_eos=True)
    right = tokens_of(truth("greedy", 0))
    with (
        Session(engine, make_spec(PROMPT, hopeless, committed=(4,))) as broken,
        Session(engine, make_spec(PROMPT, PARAMS["greedy"])) as peer,
    ):
        for length in range(5):
            broken.submit(1)
            peer.submit(length)
            with pytest.raises(InvalidRequest):
                broken.collect()
            assert peer.collect()[0].token_ids == right[length : length + 1]


def test_stop_ids_inside_an_accepted_draft_cut_the_commit_and_the_counts(
    engine: VerifierEngine, truth: Callable
) -> None:
    right = tokens_of(truth("greedy", 0))
    place = next(index for index in range(5, NUM_TOKENS) if right[index] not in right[:index])
    params = replace(PARAMS["greedy"], stop_token_ids=(right[place],))
    for draft in (None, oracle_draft(right, 4), oracle_draft(right, 9), tree_draft(right, 3)):
        commits = generate(engine, make_spec(PROMPT, params), draft)
        assert tokens_of(commits) == right[: place + 1]
        assert finish_of(commits) == (FinishReason.STOP, right[place])
        for commit in commits:
            assert len(commit.logprobs) == len(commit.token_ids)
            assert commit.num_accepted_tokens <= len(commit.token_ids)


def test_an_output_that_has_ended_does_not_go_on(engine: VerifierEngine, truth: Callable) -> None:
    right = tokens_of(truth("greedy", 0))
    with Session(engine, make_spec(PROMPT, replace(PARAMS["greedy"], max_tokens=5))) as session:
        assert tokens_of(session.step(0, max_new_tokens=9)) == right[:5]
        with pytest.raises(InvalidRequest):
            session.step(5)
        assert tokens_of(session.step(3, max_new_tokens=9)) == right[3:5], "its last reply may have been lost"


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens(engine: VerifierEngine, truth: Callable, max_tokens: int) -> None:
    right = tokens_of(truth("greedy", 0))
    params = replace(PARAMS["greedy"], max_tokens=max_tokens)
    for draft, free_run in ((None, 0), (None, 100), (oracle_draft(right, 9), 0), (tree_draft(right, 1), 0)):
        commits = generate(engine, make_spec(PROMPT, params), draft, free_run)
        assert tokens_of(commits) == right[:max_tokens]
        assert finish_of(commits) == (FinishReason.LENGTH, None)


def test_the_models_longest_context_ends_the_output(engine: VerifierEngine, loaded: LoadedModel) -> None:
    prompt = prompt_of(9, length=loaded.max_model_len - 6)
    params = replace(PARAMS["greedy"], max_tokens=100)
    plain = generate(engine, make_spec(prompt, params))
    assert len(tokens_of(plain)) == 6
    assert finish_of(plain) == (FinishReason.LENGTH, None)
    right = tokens_of(plain)
    for draft in (oracle_draft((*right, 1, 1, 1, 1), 9), random_draft(1)):
        assert tokens_of(generate(engine, make_spec(prompt, params), draft)) == right


def test_eos_ends_unless_it_is_ignored(engine: VerifierEngine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9, logit_bias=((EOS_ID, 100.0),))
    commits = generate(engine, make_spec(PROMPT, params))
    # The model's own end is no stop reason that anybody asked for.
    assert (tokens_of(commits), finish_of(commits)) == ((EOS_ID,), (FinishReason.STOP, None))
    asked = generate(engine, make_spec(PROMPT, replace(params, stop_token_ids=(EOS_ID,))))
    assert finish_of(asked) == (FinishReason.STOP, EOS_ID)
    ignored = generate(engine, make_spec(PROMPT, replace(params, ignore_eos=True)))
    assert (tokens_of(ignored), finish_of(ignored)) == ((EOS_ID,) * 9, (FinishReason.LENGTH, None))
    held_back = generate(engine, make_spec(PROMPT, replace(params, min_tokens=4)))
    assert tokens_of(held_back).index(EOS_ID) == len(tokens_of(held_back)) - 1 == 4


def test_what_can_never_be_served_is_refused_at_once(
    loaded: LoadedModel, certificate: Certificate, engine: VerifierEngine
) -> None:
    params = PARAMS["greedy"]
    for prompt in ((VOCAB_SIZE,), (-1,), prompt_of(0, loaded.max_model_len)):
        with pytest.raises(InvalidRequest):
            engine.open(make_spec(prompt, params), lambda _reply: None)
    with pytest.raises(InvalidRequest):
        engine.open(make_spec(PROMPT, params, committed=(VOCAB_SIZE,)), lambda _reply: None)
    with running_engine(loaded, certificate, EngineShape(num_blocks=10)) as small, pytest.raises(InvalidRequest):
        small.open(make_spec(PROMPT, params), lambda _reply: None)
    broken = replace(certificate, holds=False, failing_operation="mlp")
    with running_engine(loaded, broken) as uncertified:
        with pytest.raises(ExactModeRefused, match="mlp"):
            uncertified.open(make_spec(PROMPT, params), lambda _reply: None)
        assert len(tokens_of(generate(uncertified, make_spec(PROMPT, params, SpeculationMode.REJECTION)))) == NUM_TOKENS


def test_too_many_sessions_are_refused(loaded: LoadedModel, certificate: Certificate) -> None:
    with running_engine(loaded, certificate, EngineShape(max_num_seqs=2)) as engine:
        spec = make_spec(PROMPT, PARAMS["greedy"])
        with Session(engine, spec) as first, Session(engine, spec) as second:
            first.step(0)
            second.step(0)
            with pytest.raises(Overloaded):
                engine.open(spec, lambda _reply: None)
        engine.check_integrity()  # the closes have run
        assert tokens_of(generate(engine, spec))


def test_a_full_verifier_compiles_no_grammar(
    loaded: LoadedModel, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds of CPU, and a gateway asks a full verifier again 20 times a second."""
    compiled: list[object] = []
    with running_engine(loaded, certificate, EngineShape(max_num_seqs=1)) as engine:
        servicer = VerifierServicer(engine, lambda: pytest.fail("not asked"), served=ServedTarget("kind"))
        guided = replace(PARAMS["greedy"], grammar=Grammar(GrammarKind.REGEX, "[ab]{3,8}"))
        request = wire.open_verifier(make_spec(PROMPT, guided))
        with Session(engine, make_spec(PROMPT, PARAMS["greedy"])) as first:
            first.step(0)
            monkeypatch.setattr(engine, "compile_grammar", compiled.append)
            with pytest.raises(Overloaded):
                asyncio.run(servicer._open(request, lambda _reply: None))
            assert not compiled


def test_opening_many_at_once_does_not_slip_past_the_limit(loaded: LoadedModel, certificate: Certificate) -> None:
    with running_engine(loaded, certificate, EngineShape(max_num_seqs=4)) as engine:
        handles, refused = [], 0
        for _ in range(20):
            try:
                handles.append(engine.open(make_spec(PROMPT, PARAMS["greedy"]), lambda _reply: None))
            except Overloaded:
                refused += 1
        assert (len(handles), refused) == (4, 16)
        for handle in handles:
            engine.close(handle)
        engine.check_integrity()


def test_closing_in_the_middle_of_a_free_run_frees_everything(engine: VerifierEngine) -> None:
    with Session(engine, make_spec(PROMPT, replace(PARAMS["greedy"], max_tokens=200))) as session:
        session.submit(0, max_new_tokens=200)
        session.replies.get(timeout=60)
    engine.check_integrity()
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks
    engine.close(session.handle)  # once more is harmless
    engine.check_integrity()


def test_a_step_takes_the_place_of_a_free_run(engine: VerifierEngine, truth: Callable) -> None:
    """The gateway changed its mind, for instance at a stop string: the output goes on where the step says."""
    right = tokens_of(truth("greedy", 0))
    with Session(engine, make_spec(PROMPT, PARAMS["greedy"])) as session:
        session.submit(0, max_new_tokens=30)
        for _ in range(3):
            session.replies.get(timeout=60)
        session.submit(2, Proposal(2, right[2:6], "oracle"))
        seen = []
        while not seen or seen[-1].num_draft_tokens == 0:
            seen.append(session.replies.get(timeout=60))
        assert seen[-1].base_len == 2
        assert seen[-1].token_ids == right[2:7]
