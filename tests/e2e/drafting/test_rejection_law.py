"""Rejection mode over REST: the first tokens follow the law that `logprobs` reports, drafts or not.

Temperature 1 and top-k 4, so that the joint law has few cells. The law of a prefix is what a request with that prefix
as its prompt reports, cut to the four likeliest tokens. OUTRIDER_LAW_SAMPLES sets how many outputs the main case draws.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass, field

import httpx
import numpy as np
import pytest
from e2e_rest import complete, speculation
from e2e_stack import DEMO_TARGET, RunningStack
from tokenizers import Tokenizer

from tests.verifier_service.acceptance.toy import SMALLEST_P_VALUE, chi_square_p_value

pytestmark = pytest.mark.storm

TOP_K = 4
GAMMA = 3
# The first token comes without a draft, three are drafted, the last one is the bonus: a whole block is decided.
NUM_TOKENS = 5
# How many of the first tokens are looked at together; four of them hold all three places of the block.
JOINT_LENGTHS = (3, 4)
CHOICES = 16
# A session is closed after its answer: twice as many as are asked for may be open, and the verifier takes 64.
AT_ONCE = 2
DEFAULT_SAMPLES = 2_048
FEWER_SAMPLES = 1_536
# More log-probabilities than top-k keeps: bfloat16 logits tie, and ties go to the smaller id.
NUM_LOGPROBS = 20
PROMPT = "import os\nimport sys\n\n\ndef main(path):\n    with open(path) as handle:\n        "

Tokens = tuple[int, ...]
Law = dict[Tokens, dict[int, float]]


@dataclass
class Sampled:
    """`outputs` counts the first tokens of each choice; `origins` where all tokens came from."""

    outputs: Counter[Tokens] = field(default_factory=Counter)
    origins: Counter[str] = field(default_factory=Counter)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    token_ids: list[int] = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    return token_ids


@pytest.fixture(scope="module")
async def law(http: httpx.AsyncClient, tokenizer: Tokenizer, prompt: list[int]) -> Law:
    """Prefix -> the four likeliest next tokens and their probabilities."""
    id_of_text: dict[str, list[int]] = {}
    for token_id in range(tokenizer.get_vocab_size()):
        id_of_text.setdefault(tokenizer.decode([token_id], skip_special_tokens=False), []).append(token_id)
    room = asyncio.Semaphore(8)

    async def next_law(prefix: Tokens) -> dict[int, float]:
        body = {"prompt": [*prompt, *prefix], "max_tokens": 1, "temperature": 0, "logprobs": NUM_LOGPROBS}
        async with room:
            answer = await complete(http, {**body, "ignore_eos": True, **speculation("off")})
        found: list[tuple[float, int]] = []
        for text, logprob in answer.logprobs["top_logprobs"][0].items():
            same_text = id_of_text.get(text, [])
            found.append((-logprob, same_text[0] if len(same_text) == 1 else -1))
        best = sorted(found)[:TOP_K]
        assert all(token_id >= 0 for _, token_id in best), f"a text that is not one token's, after {prefix}"
        weights = np.exp([-negative for negative, _ in best])
        return dict(zip((token_id for _, token_id in best), (weights / weights.sum()).tolist(), strict=True))

    laws: Law = {}
    prefixes: list[Tokens] = [()]
    for _ in range(max(JOINT_LENGTHS)):
        laws |= dict(zip(prefixes, await asyncio.gather(*map(next_law, prefixes)), strict=True))
        prefixes = [(*prefix, token) for prefix in prefixes for token in laws[prefix]]
    return laws


async def sample(http: httpx.AsyncClient, prompt: list[int], num_samples: int, method: str) -> Sampled:
    body = {
        "prompt": prompt,
        "n": CHOICES,
        "max_tokens": NUM_TOKENS,
        "temperature": 1,
        "top_k": TOP_K,
        "ignore_eos": True,
        "return_token_ids": True,
        **speculation(method, None if method == "off" else GAMMA, mode="rejection"),
    }
    sampled = Sampled()
    room = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> None:
        async with room:
            reply = await http.post("/v1/completions", json={**body, "seed": seed})
        assert reply.status_code == 200, reply.text
        choices = reply.json()["choices"]
        assert len(choices) == CHOICES
        for choice in choices:
            assert len(choice["token_ids"]) == NUM_TOKENS
            sampled.outputs[tuple(choice["token_ids"])] += 1
            sampled.origins.update(choice["outrider"]["origins"])

    # Fixed seeds: a correct law has its small chance to look wrong once, not in each run.
    await asyncio.gather(*map(one, range(-(-num_samples // CHOICES))))
    return sampled


def p_value(law: Law, sampled: Sampled, length: int) -> float:
    """Of the joint law of the first `length` tokens; 0 if one was seen that the law excludes."""
    probs: dict[Tokens, float] = {(): 1.0}
    for _ in range(length):
        probs = {(*prefix, token): w * prob for prefix, w in probs.items() for token, prob in law[prefix].items()}
    seen: Counter[Tokens] = Counter()
    for output, count in sampled.outputs.items():
        seen[output[:length]] += count
    if seen.keys() - probs.keys():
        return 0.0
    counts = np.array([seen[sequence] for sequence in probs])
    return chi_square_p_value(counts, np.array(list(probs.values())))


def test_the_law_is_one_that_can_be_missed(law: Law) -> None:
    """Spread out enough: no prefix within the first two tokens leaves everything to one token."""
    likely = [max(probs.values()) for prefix, probs in law.items() if len(prefix) < 2]
    assert len(law) == sum(TOP_K**length for length in range(max(JOINT_LENGTHS)))
    assert np.mean(likely) < 0.8


def check_law(law: Law, sampled: Sampled) -> None:
    p_values = {length: p_value(law, sampled, length) for length in JOINT_LENGTHS}
    print(f"{sampled.outputs.total()} outputs, {dict(sampled.origins)}, p-values {p_values}")
    assert min(p_values.values()) > SMALLEST_P_VALUE, p_values


async def test_drafted_tokens_follow_the_reported_law(
    stack: RunningStack, http: httpx.AsyncClient, law: Law, prompt: list[int]
) -> None:
    num_samples = int(os.environ.get("OUTRIDER_LAW_SAMPLES", DEFAULT_SAMPLES))
    sampled = await sample(http, prompt, num_samples, "draft_model")
    check_law(law, sampled)
    # Drafts decided the outcome: most rounds had one, and both verdicts were frequent.
    assert sampled.origins["accepted"] > 0.3 * num_samples
    assert sampled.origins["corrected"] > 0.2 * num_samples
    stack.wait_idle()


async def test_tokens_copied_from_the_prompt_follow_the_reported_law(
    http: httpx.AsyncClient, law: Law, prompt: list[int]
) -> None:
    sampled = await sample(http, prompt, FEWER_SAMPLES, "ngram")
    check_law(law, sampled)
    assert sampled.origins["accepted"] > 0.1 * FEWER_SAMPLES
    assert sampled.origins["corrected"] > 0.1 * FEWER_SAMPLES


async def test_without_drafts_and_what_another_law_looks_like(
    http: httpx.AsyncClient, law: Law, prompt: list[int]
) -> None:
    """The same samples are refused by a law that differs in one prefix: a quarter of one token's mass has moved."""
    sampled = await sample(http, prompt, FEWER_SAMPLES, "off")
    check_law(law, sampled)
    assert set(sampled.origins) == {"target"}
    shifted = {prefix: dict(probs) for prefix, probs in law.items()}
    first, second = sorted(law[()], key=lambda token: -law[()][token])[:2]
    moved = 0.25 * law[()][first]
    shifted[()][first] -= moved
    shifted[()][second] += moved
    refusal = p_value(shifted, sampled, 3)
    print(f"p-value {refusal} under the other law")
    assert refusal < SMALLEST_P_VALUE
