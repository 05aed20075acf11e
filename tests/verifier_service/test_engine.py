"""The verifier's engine on a real tiny Llama: exact mode gives one output, whatever is drafted, whoever else runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers

from outrider.engine.certificate import Certificate
from outrider.engine.model.loaded import LoadedModel
from outrider.shared.sampling_params import SamplingParams
from outrider.verifier_service.engine import VerifierEngine
from tests.verifier_service.drafts import drafts_for, faulty_draft, generated_alike, tree_draft
from tests.verifier_service.engine_client import (
    NUM_TOKENS,
    PARAMS,
    PROMPT,
    Draft,
    EngineShape,
    finish_of,
    generate,
    logprobs_of,
    make_spec,
    prompt_of,
    running_engine,
    tokens_of,
)


@pytest.mark.parametrize("name", sorted(PARAMS))
@pytest.mark.parametrize("kind", ["random", "oracle", "long oracle", "faulty", "late", "tree"])
def test_any_draft_gives_the_same_tokens_and_logprobs(
    engine: VerifierEngine, truth: Callable, name: str, kind: str
) -> None:
    generated_alike(engine, truth, kind, name)


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
        assert engine.rounds.scheduler.num_preemptions > 0
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
