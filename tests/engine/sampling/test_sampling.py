"""Every sampling transform against a plain transcription in Python floats, at every position of a draft path."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outrider.engine.sampling.laws import LogitsProcessor, draw, probabilities, token_logprob
from outrider.shared.errors import NoTokenPermitted
from outrider.shared.sampling_params import SamplingParams

VOCAB_SIZE = 12
STOP_IDS = (2, 5)


def plain_law(
    params: SamplingParams, prompt: list[int], output: list[int], logits: list[float], stop_ids: tuple[int, ...]
) -> dict[int, float]:
    """Token -> probability, one rule after another, in the words of vLLM's documentation; empty at a dead end."""
    values = dict(enumerate(logits))
    if params.allowed_token_ids:
        values = {token: value for token, value in values.items() if token in params.allowed_token_ids}
    for token, bias in params.logit_bias:
        if token in values:
            values[token] += bias
    for token in values:
        if token in prompt or token in output:
            if values[token] > 0:
                values[token] /= params.repetition_penalty
            else:
                values[token] *= params.repetition_penalty
        values[token] -= params.frequency_penalty * output.count(token)
        if token in output:
            values[token] -= params.presence_penalty
    for word in params.bad_words:
        begun = list(word[:-1])
        if not begun or (output[len(output) - len(begun) :] == begun and len(output) >= len(begun)):
            values.pop(word[-1], None)
    if len(output) < params.min_tokens and set(values) - set(stop_ids):
        values = {token: value for token, value in values.items() if token not in stop_ids}
    if not values:
        return {}
    if params.temperature == 0.0:
        return {max(values, key=lambda token: (values[token], -token)): 1.0}
    best = max(values.values())
    weights = {token: math.exp((value - best) / params.temperature) for token, value in values.items()}
    order = sorted(weights, key=lambda token: (-weights[token], token))
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        total = math.fsum(weights[token] for token in order)
        kept, mass = [], 0.0
        for token in order:
            if kept and mass >= params.top_p * total:
                break
            kept.append(token)
            mass += weights[token]
        order = kept
    order = [token for token in order if weights[token] >= params.min_p * weights[order[0]]]
    total = math.fsum(weights[token] for token in order)
    return {token: weights[token] / total for token in order}


tokens = st.integers(0, VOCAB_SIZE - 1)
params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    min_tokens=st.sampled_from([0, 3]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.5]), max_size=3).map(
        lambda biases: tuple(biases.items())
    ),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    allowed_token_ids=st.just(()) | st.lists(tokens, min_size=1, max_size=5, unique=True).map(tuple),
)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    params_strategy,
    st.lists(tokens, min_size=1, max_size=4),
    st.lists(tokens, max_size=6),
    st.integers(0, 2**32 - 1),
)
def test_all_transforms_together(params: SamplingParams, prompt: list[int], output: list[int], seed: int) -> None:
    logits = (np.random.default_rng(seed).standard_normal(VOCAB_SIZE) * 3).astype(np.float32)
    processor = LogitsProcessor(params, prompt, STOP_IDS)
    expected = plain_law(params, prompt, output, logits.astype(float).tolist(), STOP_IDS)
    if not expected:
        with pytest.raises(NoTokenPermitted):
            processor.log_weights(logits, output)
        return
    log_weights = processor.log_weights(logits, output)
    assert set(np.flatnonzero(log_weights > -np.inf).tolist()) == set(expected)
    probs = probabilities(log_weights)
    for token, prob in expected.items():
        assert probs[token] == pytest.approx(prob, rel=1e-12)


def test_greedy_ties_go_to_the_smallest_id() -> None:
    logits = np.array([0.0, 3.0, 1.0, 3.0], dtype=np.float32)
    law = LogitsProcessor(SamplingParams(temperature=0.0), [0], ()).log_weights(logits, [])
    assert np.flatnonzero(law > -np.inf).tolist() == [1]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), [0, 1]),
        (SamplingParams(top_p=0.5), [0, 1]),
        (SamplingParams(top_p=0.51), [0, 1, 2]),
        (SamplingParams(min_p=1.0), [0, 1, 2, 3]),
    ],
)
def test_ties_at_a_border_go_to_the_smaller_ids(params: SamplingParams, kept: list[int]) -> None:
    law = LogitsProcessor(params, [0], ()).log_weights(np.zeros(4, dtype=np.float32), [])
    assert np.flatnonzero(law > -np.inf).tolist() == kept


@pytest.mark.parametrize("spread", [0.001, 1.0, 3.0, 10.0])
@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0.1},
        {"top_p": 0.9},
        {"top_p": 0.999999},
        {"top_k": 40},
        {"top_k": 30_000},
        {"top_k": 500, "top_p": 0.8, "min_p": 0.01},
        {"min_p": 0.05},
    ],
    ids=str,
)
def test_truncation_of_large_vocabularies(spread: float, fields: dict[str, float]) -> None:
    """What is kept is found without sorting it all; the transcription sorts."""
    logits = np.random.default_rng(7).normal(0, spread, 20_000).astype(np.float32)
    params = SamplingParams(temperature=0.8, **fields)  # type: ignore[arg-type]
    law = LogitsProcessor(params, [0], ()).log_weights(logits, [])
    expected = plain_law(params, [], [], logits.tolist(), ())
    assert set(np.flatnonzero(law > -np.inf).tolist()) == set(expected)
    probs = probabilities(law)
    assert probs[list(expected)] == pytest.approx(list(expected.values()), rel=1e-9)


@pytest.mark.parametrize("num_rows", [1, 7])
def test_temperature_and_top_p_against_torch(num_rows: int) -> None:
    """An outside transcription: sort, softmax and cumulative sum of torch, as transformers' TopPLogitsWarper does."""
    generator = torch.Generator().manual_seed(5)
    processor = LogitsProcessor(SamplingParams(temperature=0.6, top_p=0.8), [0], ())
    for _ in range(num_rows):
        logits = torch.randn(500, generator=generator) * 4
        scaled = logits.double() / 0.6
        ordered, order = scaled.sort(descending=False)
        removed = ordered.softmax(-1).cumsum(-1) <= 1 - 0.8
        removed[-1] = False
        expected = scaled.masked_fill(torch.zeros(500, dtype=torch.bool).scatter(0, order, removed), -torch.inf)
        found = probabilities(processor.log_weights(logits.numpy(), []))
        np.testing.assert_allclose(found, expected.softmax(-1).numpy(), rtol=1e-10, atol=0)


def test_a_row_does_not_depend_on_the_rows_before_it() -> None:
    """Drafts ask for rows in any order, and again after a cut: the processor must keep nothing."""
    params = SamplingParams(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3, bad_words=((3, 4), (1,)))
    rng = random.Random(2)
    rows = np.random.default_rng(2).standard_normal((20, VOCAB_SIZE)).astype(np.float32)
    outputs = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 6))] for _ in rows]
    used = LogitsProcessor(params, [1, 2], STOP_IDS)
    for place in [*range(20), *reversed(range(20))]:
        fresh = LogitsProcessor(params, [1, 2], STOP_IDS)
        np.testing.assert_array_equal(
            used.log_weights(rows[place], outputs[place]), fresh.log_weights(rows[place], outputs[place])
        )


def test_logits_are_left_alone() -> None:
    logits = np.arange(VOCAB_SIZE, dtype=np.float32)
    params = SamplingParams(logit_bias=((1, 5.0),), top_k=2, repetition_penalty=2.0)
    LogitsProcessor(params, [0], STOP_IDS).log_weights(logits, [1, 2])
    assert logits.tolist() == list(range(VOCAB_SIZE))


@pytest.mark.parametrize("eos_token_ids", [(), STOP_IDS])
def test_a_dead_end_is_refused_with_its_fields(eos_token_ids: tuple[int, ...]) -> None:
    params = SamplingParams(allowed_token_ids=(4,), bad_words=((4,),))
    with pytest.raises(NoTokenPermitted, match="allowed_token_ids, bad_words leave no token") as refused:
        LogitsProcessor(params, [0], eos_token_ids).log_weights(np.zeros(VOCAB_SIZE, dtype=np.float32), [])
    assert refused.value.param == "allowed_token_ids"


@pytest.mark.parametrize(
    ("params", "is_plain"),
    [
        (SamplingParams(temperature=0.0), True),
        (SamplingParams(temperature=0.0, top_k=3, top_p=0.5), True),
        (SamplingParams(temperature=1.0), False),
        (SamplingParams(temperature=0.0, frequency_penalty=0.1), False),
        (SamplingParams(temperature=0.0, min_tokens=1), False),
        (SamplingParams(temperature=0.0, logit_bias=((1, 1.0),)), False),
    ],
)
def test_plain_argmax_is_claimed_only_where_it_is_true(params: SamplingParams, is_plain: bool) -> None:
    assert LogitsProcessor(params, [0], STOP_IDS).is_plain_argmax is is_plain


class TestDraw:
    def test_follows_the_law(self) -> None:
        weights = np.array([0.0, 3.0, 1.0, 0.0, 0.5, 0.0])
        rng = np.random.default_rng(11)
        counts = np.bincount([draw(weights, rng) for _ in range(50_000)], minlength=6)
        assert counts[weights == 0].sum() == 0
        support = weights > 0
        expected = weights[support] / weights.sum() * 50_000
        assert stats.chisquare(counts[support], expected).pvalue > 1e-4

    @pytest.mark.parametrize("uniform", [0.0, 0.5, np.nextafter(1.0, 0.0)])
    def test_never_draws_a_token_without_mass(self, uniform: float) -> None:
        class Fixed:
            def random(self) -> float:
                return uniform

        for weights in ([0.0, 1e-300, 0.0], [0.0, 0.1, 0.2, 0.7, 0.0], [1e-17, 0.0, 1.0, 1e-17, 0.0]):
            assert weights[draw(np.array(weights), Fixed())] > 0  # type: ignore[arg-type]


class TestTokenLogprob:
    def test_against_torch(self) -> None:
        generator = torch.Generator().manual_seed(1)
        for _ in range(50):
            logits = torch.randn(40, generator=generator) * 5
            expected = logits.double().log_softmax(-1)
            token = int(torch.randint(40, (1,), generator=generator))
            found = token_logprob(logits.numpy(), token, 5)
            top = expected.topk(5)
            assert found.logprob == pytest.approx(float(expected[token]), abs=1e-12)
            assert found.rank == 1 + int((expected > expected[token]).sum())
            assert found.top_token_ids == tuple(top.indices.tolist())
            assert found.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-12)

    def test_ties_at_the_border_go_to_the_smallest_ids(self) -> None:
        logits = np.zeros(30, dtype=np.float32)
        logits[17] = 1.0
        assert token_logprob(logits, 3, 4).top_token_ids == (17, 0, 1, 2)

    def test_more_than_the_vocabulary_gives_the_vocabulary(self) -> None:
        assert token_logprob(np.array([1.0, 2.0], dtype=np.float32), 0, 20).top_token_ids == (1, 0)
