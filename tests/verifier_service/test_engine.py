"""The verifier's engine on a real tiny Llama: exact mode gives one output, whatever is drafted, whoever else runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from engine.certificate import Certificate
from engine.model import LoadedModel
from shared.errors import CommitRefused, ExactModeRefused, InvalidRequest, Overloaded
from shared.messages import LAW_TOTAL, FinishReason, Proposal, SparseLaw
from shared.sampling_params import SamplingParams, SpeculationMode
from tests.verifier_service.drafts import faulty_draft, late_draft, oracle_draft, random_draft, tree_draft
from tests.verifier_service.engine_client import (
    EOS_ID,
    VOCAB_SIZE,
    Draft,
    EngineShape,
    Session,
    finish_of,
    generate,
    make_spec,
    running_engine,
    tokens_of,
)
from verifier_service.engine import VerifierEngine

NUM_TOKENS = 40
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=2),
    "greedy with penalties": SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.4
    ),
    "sampled": SamplingParams(
        temperature=0.7, top_p=0.9, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=0
    ),
    "hot": SamplingParams(
        temperature=1.3,
        top_k=40,
        seed=4,
        max_tokens=NUM_TOKENS,
        presence_penalty=0.5,
        bad_words=((7, 9), (5,)),
        min_tokens=20,
    ),
}


def prompt_of(seed: int, length: int = 37) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length))


PROMPT = prompt_of(0)


@pytest.fixture(scope="session")
def truth(loaded: LoadedModel, certificate: Certificate) -> Callable[[str, int], list]:
    """Commits of plain decoding, one token a forward, alone, without any cache: what everything must equal."""
    known: dict[tuple[str, int], list] = {}

    def plain(name: str, prompt_seed: int) -> list:
        if (name, prompt_seed) not in known:
            with running_engine(loaded, certificate, EngineShape(prefix_caching=False)) as engine:
                known[name, prompt_seed] = generate(engine, make_spec(prompt_of(prompt_seed), PARAMS[name]))
        return known[name, prompt_seed]

    return plain


@pytest.fixture
def engine(loaded: LoadedModel, certificate: Certificate):
    with running_engine(loaded, certificate) as running:
        yield running


def logprobs_of(commits: list) -> list:
    return [entry for commit in commits for entry in commit.logprobs]


def drafts_for(right: tuple[int, ...]) -> dict[str, Draft]:
    return {
        "random": random_draft(1),
        "oracle": oracle_draft(right),
        "long oracle": oracle_draft(right, 9),
        "faulty": faulty_draft(right, 2),
        "late": late_draft(right, 3),
        "tree": tree_draft(right, 4),
    }


@pytest.mark.parametrize("name", sorted(PARAMS))
@pytest.mark.parametrize("kind", ["random", "oracle", "long oracle", "faulty", "late", "tree"])
def test_any_draft_gives_the_same_tokens_and_logprobs(
    engine: VerifierEngine, truth: Callable, name: str, kind: str
) -> None:
    expected = truth(name, 0)
    right = tokens_of(expected)
    commits = generate(engine, make_spec(PROMPT, PARAMS[name]), drafts_for(right)[kind])
    assert tokens_of(commits) == right
    assert finish_of(commits) == finish_of(expected)
    assert logprobs_of(commits) == logprobs_of(expected)
    accepted = sum(commit.num_accepted_tokens for commit in commits)
    assert (accepted > len(right) // 4) == (kind != "random")


@pytest.mark.parametrize("name", sorted(PARAMS))
@pytest.mark.parametrize("free_run", [1, 7, 1000])
def test_free_runs(engine: VerifierEngine, truth: Callable, name: str, free_run: int) -> None:
    expected = truth(name, 0)
    commits = generate(engine, make_spec(PROMPT, PARAMS[name]), free_run=free_run)
    assert tokens_of(commits) == tokens_of(expected)
    assert logprobs_of(commits) == logprobs_of(expected)
    assert finish_of(commits) == finish_of(expected)


@pytest.mark.parametrize("chunk", [1, 5, 16, 37])
def test_chunked_prefill(loaded: LoadedModel, certificate: Certificate, truth: Callable, chunk: int) -> None:
    with running_engine(loaded, certificate, EngineShape(prefill_chunk_size=chunk, block_size=5)) as engine:
        for name in ("greedy", "hot"):
            right = tokens_of(truth(name, 0))
            commits = generate(engine, make_spec(PROMPT, PARAMS[name]), faulty_draft(right, 6))
            assert tokens_of(commits) == right


@pytest.mark.parametrize("budget", [3, 8, 41])
def test_a_small_row_budget_cuts_prefills_and_drafts(
    loaded: LoadedModel, certificate: Certificate, truth: Callable, budget: int
) -> None:
    with running_engine(loaded, certificate, EngineShape(max_num_batched_tokens=budget)) as engine:
        right = tokens_of(truth("sampled", 0))
        assert tokens_of(generate(engine, make_spec(PROMPT, PARAMS["sampled"]), tree_draft(right, 7))) == right


def test_a_prefix_cache_hit_changes_nothing(engine: VerifierEngine, truth: Callable) -> None:
    right = tokens_of(truth("sampled", 0))
    for expected_hit in (0, 36, 36):
        commits = generate(engine, make_spec(PROMPT, PARAMS["sampled"]), faulty_draft(right, 8))
        assert commits[0].num_cached_tokens == expected_hit
        assert tokens_of(commits) == right
    salted = generate(engine, make_spec(PROMPT, PARAMS["sampled"], cache_salt="mine"))
    assert salted[0].num_cached_tokens == 0
    assert tokens_of(salted) == right


SEEDS = range(6)


def run_together(engine: VerifierEngine, truth: Callable, draft_of: Callable[[tuple[int, ...], int], Draft | None]):
    """Six sessions at once, of all parameters; returns (found, expected) per session."""

    def one(seed: int) -> tuple:
        name = sorted(PARAMS)[seed % len(PARAMS)]
        expected = truth(name, seed)
        spec = make_spec(prompt_of(seed), PARAMS[name])
        return generate(engine, spec, draft_of(tokens_of(expected), seed), free_run=seed), expected

    for seed in SEEDS:
        truth(sorted(PARAMS)[seed % len(PARAMS)], seed)  # not within the threads
    with ThreadPoolExecutor(len(SEEDS)) as pool:
        return list(pool.map(one, SEEDS))


@pytest.mark.parametrize("kind", ["none", "random", "oracle", "faulty", "late", "tree"])
def test_six_sessions_at_once(engine: VerifierEngine, truth: Callable, kind: str) -> None:
    def draft_of(right: tuple[int, ...], seed: int) -> Draft | None:
        return None if kind == "none" else drafts_for(right)[kind]

    for found, expected in run_together(engine, truth, draft_of):
        assert tokens_of(found) == tokens_of(expected)
        assert logprobs_of(found) == logprobs_of(expected)


@pytest.mark.parametrize("num_blocks", [20, 24, 45])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemption_costs_time_and_no_token(
    loaded: LoadedModel, certificate: Certificate, truth: Callable, num_blocks: int, prefix_caching: bool
) -> None:
    """A session needs 20 blocks in the end, six would need 120."""
    shape = EngineShape(num_blocks=num_blocks, prefix_caching=prefix_caching, prefill_chunk_size=16)
    with running_engine(loaded, certificate, shape) as engine:
        outcomes = run_together(engine, truth, lambda right, seed: list(drafts_for(right).values())[seed])
        assert engine._scheduler.num_preemptions > 0
    for found, expected in outcomes:
        assert tokens_of(found) == tokens_of(expected)
        assert logprobs_of(found) == logprobs_of(expected)


def test_greedy_equals_transformers(engine: VerifierEngine, checkpoint: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    params = PARAMS["greedy"]
    for seed in range(4):
        prompt = prompt_of(seed, length=5 + 9 * seed)
        with torch.inference_mode():
            expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS)[
                0, len(prompt) :
            ]
        right = tuple(expected.tolist())
        assert tokens_of(generate(engine, make_spec(prompt, params))) == right
        assert tokens_of(generate(engine, make_spec(prompt, params), faulty_draft(right, seed))) == right


def test_prompt_logprobs_equal_transformers_however_the_prompt_is_cut(
    loaded: LoadedModel, certificate: Certificate, checkpoint: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        laws = model(torch.tensor([PROMPT])).logits[0].double().log_softmax(-1)
    params = SamplingParams(temperature=0.0, max_tokens=3, num_prompt_logprobs=2)
    found = []
    for chunk in (128, 7, 1):
        with running_engine(loaded, certificate, EngineShape(prefill_chunk_size=chunk)) as engine:
            for _ in range(2):  # the second time the prefix is in the cache, and must not be taken from there
                commits = generate(engine, make_spec(PROMPT, params))
                assert [len(commit.prompt_logprobs) for commit in commits] == [len(PROMPT), 0, 0]
                found.append(commits[0].prompt_logprobs)
    assert all(entry == found[0] for entry in found)
    for position in range(1, len(PROMPT)):
        law, entry = laws[position - 1], found[0][position]
        assert entry.logprob == pytest.approx(float(law[PROMPT[position]]), abs=1e-4)
        assert entry.rank == 1 + int((law > law[PROMPT[position]]).sum())
        assert entry.top_token_ids == tuple(law.topk(2).indices.tolist())


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
    """No token is allowed and nothing may end the output: that session fails, the one in its batch does not."""
    hopeless = SamplingParams(temperature=1.0, seed=1, allowed_token_ids=(4,), bad_words=((4,),), ignore_eos=True)
    right = tokens_of(truth("greedy", 0))
    with (
        Session(engine, make_spec(PROMPT, hopeless)) as broken,
        Session(engine, make_spec(PROMPT, PARAMS["greedy"])) as peer,
    ):
        for length in range(5):
            broken.submit(0)
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
