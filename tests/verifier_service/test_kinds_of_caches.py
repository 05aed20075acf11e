"""The engine on a KV cache in 8 bits, and on latents of which an indexer chooses: one output, whatever is drafted, cut,
cached, preempted or taken over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.certificate import Certificate, certify
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from outrider.verifier_service.engine import VerifierEngine
from tests.drafting.mtp_targets import save_mtp_target
from tests.engine.model.multimodal_models import save_minimax_m3
from tests.engine.tiny_models import save_tiny_model
from tests.verifier_service.drafts import drafts_for, faulty_draft, generated_alike
from tests.verifier_service.engine_client import (
    EOS_ID,
    PARAMS,
    PROMPT,
    VOCAB_SIZE,
    EngineShape,
    generate,
    logprobs_of,
    make_spec,
    plain_decoding,
    prompt_of,
    running_engine,
    tokens_of,
)

SEEDS = range(6)
_COMMON = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": EOS_ID, "hidden_size": 64}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("MambaConfig", {**_COMMON, "num_hidden_layers": 3, "state_size": 12, "time_step_rank": 10}),
    "bloom": ("BloomConfig", {**_COMMON, "n_layer": 2, "n_head": 4}),
}


@dataclass
class Target:
    loaded: LoadedModel
    certificate: Certificate
    truth: Callable[[str, int], list]


@pytest.fixture(scope="module", params=["int8", "fp8", "indexed", "minimax_m3", "mamba", "bloom"])
def target(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """indexed: one layer chooses 5 keys of each token, and the other attends those too. minimax_m3: one chooses 4
    blocks of 5 keys. mamba: nothing attends. bloom: keys are cached with their positions."""
    folder = tmp_path_factory.mktemp("kinds") / "target"
    if request.param == "indexed":
        loaded = load_model(str(save_mtp_target("glm_moe_dsa", folder).folder), dtype="float32")
        assert [shape.index_dim for shape in loaded.layer_shapes] == [16, 0]
    elif request.param == "minimax_m3":
        save_minimax_m3(folder)
        loaded = load_model(str(folder), dtype="float32")
        assert [shape.index_dim for shape in loaded.layer_shapes] == [0, 20]
    elif request.param in OTHERS:
        save_tiny_model(*OTHERS[request.param], folder)
        loaded = load_model(str(folder), dtype="float32", max_model_len=256)
    else:
        loaded = load_model(str(checkpoint), dtype="float32", kv_cache_dtype=request.param)
    certificate = certify(loaded, ModelRunner(loaded, loaded.make_cache(64, 4)))
    assert certificate.holds
    return Target(loaded, certificate, plain_decoding(loaded, certificate))


@pytest.fixture
def engine_of_target(target: Target) -> Iterator[VerifierEngine]:
    with running_engine(target.loaded, target.certificate) as running:
        yield running


@pytest.mark.parametrize("kind", ["long oracle", "faulty", "late", "tree"])
def test_any_draft_gives_the_same_tokens_and_logprobs(
    engine_of_target: VerifierEngine, target: Target, kind: str
) -> None:
    for name in ("greedy", "sampled"):
        generated_alike(engine_of_target, target.truth, kind, name)


@pytest.mark.parametrize("target", ["int8", "fp8"], indirect=True)
def test_codes_are_another_function_than_a_plain_cache(target: Target, truth: Callable) -> None:
    """Near it, and not it: else the cache would not be in force."""
    ours, plain = logprobs_of(target.truth("greedy", 0))[0], logprobs_of(truth("greedy", 0))[0]
    assert 0 < abs(ours.logprob - plain.logprob) < 0.2


@pytest.mark.parametrize("chunk", [1, 5, 37])
def test_chunked_prefill(target: Target, chunk: int) -> None:
    shape = EngineShape(prefill_chunk_size=chunk, block_size=5)
    with running_engine(target.loaded, target.certificate, shape) as engine:
        right = tokens_of(target.truth("hot", 0))
        assert tokens_of(generate(engine, make_spec(PROMPT, PARAMS["hot"]), faulty_draft(right, 6))) == right


def test_a_prefix_cache_hit_changes_nothing(engine_of_target: VerifierEngine, target: Target) -> None:
    right = tokens_of(target.truth("sampled", 0))
    for expected_hit in (0, 36):
        commits = generate(engine_of_target, make_spec(PROMPT, PARAMS["sampled"]), faulty_draft(right, 8))
        assert commits[0].num_cached_tokens == expected_hit
        assert tokens_of(commits) == right


@pytest.mark.parametrize(
    "target",
    [
        *("int8", "indexed", "mamba", "bloom"),
        *(pytest.param(name, marks=pytest.mark.storm) for name in ("fp8", "minimax_m3")),
    ],
    indirect=True,
)
def test_preemption_costs_no_token(target: Target) -> None:
    """Six sessions at once on blocks for one and a little more."""
    names = [sorted(PARAMS)[seed % len(PARAMS)] for seed in SEEDS]
    expected = [target.truth(name, seed) for name, seed in zip(names, SEEDS, strict=True)]
    with running_engine(target.loaded, target.certificate, EngineShape(num_blocks=24, prefill_chunk_size=16)) as engine:

        def one(seed: int) -> list:
            draft = list(drafts_for(tokens_of(expected[seed])).values())[seed]
            return generate(engine, make_spec(prompt_of(seed), PARAMS[names[seed]]), draft, free_run=seed)

        with ThreadPoolExecutor(len(SEEDS)) as pool:
            found = list(pool.map(one, SEEDS))
        assert engine.rounds.scheduler.num_preemptions > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert tokens_of(ours) == tokens_of(theirs)
        assert logprobs_of(ours) == logprobs_of(theirs)


def test_a_session_taken_over_by_another_engine_goes_on_with_the_same_tokens(target: Target) -> None:
    right = tokens_of(target.truth("sampled", 0))
    with running_engine(target.loaded, target.certificate) as engine:
        for cut in (1, 13, len(right) - 1):
            spec = make_spec(PROMPT, PARAMS["sampled"], committed=right[:cut], epoch=2)
            assert tokens_of(generate(engine, spec, faulty_draft(right, cut))) == right[cut:]
