"""Assisted generation of transformers with the real drafter service: law, greedy text, and drafters that die."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outrider.transformers import Drafts
from tests.plugins.served_drafter import Method, drafter, until, with_ids

ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 5
PROMPT = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]
# A text that repeats itself, for n-grams.
CODE_IDS = [*range(40, 60)] * 3


@contextmanager
def drafts_of(model: Any, *addresses: str, **options: Any) -> Iterator[Drafts]:
    given = {"method": "ngram", "deadline_ms": 10_000, **options}
    made = Drafts(model, drafters=list(addresses), **given)
    try:
        until(lambda: all(link.is_up for link in made._fleet.links), "a drafter is not there")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def demo() -> Any:
    return AutoModelForCausalLM.from_pretrained(ROOT / "models/demo-target", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tiny() -> Any:
    """A law with some likely tokens and no certain one."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.6,
    )
    return LlamaForCausalLM(config).eval()


def generated(model: Any, prompt: list[int], num_tokens: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": num_tokens, "pad_token_id": 0, "eos_token_id": None, **options}
    tokens: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    return tokens


@contextmanager
def counted_forwards(model: Any) -> Iterator[list[int]]:
    """Rows of each forward pass."""
    rows: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _module, _args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield rows
    finally:
        hook.remove()


def test_greedy_text_is_the_model_s_in_fewer_passes(demo: Any) -> None:
    plain = generated(demo, CODE_IDS, 60)
    with drafter() as served, drafts_of(demo, served.address) as drafts, counted_forwards(demo) as rows:
        assert generated(demo, CODE_IDS, 60, custom_generate=drafts) == plain
        assert len(rows) < 50
        until(lambda: served.engine.num_sessions == 0, "the session is still open")


def test_the_model_is_left_as_it_was(demo: Any) -> None:
    before = set(vars(demo))
    with drafter() as served, drafts_of(demo, served.address) as drafts:
        generated(demo, CODE_IDS, 4, custom_generate=drafts)
    assert set(vars(demo)) == before


def test_drafters_that_are_killed_in_mid_generation_change_no_token(demo: Any) -> None:
    plain = generated(demo, CODE_IDS, 60)
    with drafter() as first, drafter() as second, drafts_of(demo, first.address, second.address) as drafts:
        left, num_drafted = [first, second], {}

        def kill(ids: Any, _scores: Any, **_kwargs: Any) -> Any:
            """One after 15 tokens, the one with the session; the other after 30."""
            if left and ids.shape[1] - len(CODE_IDS) >= (15 if len(left) == 2 else 30):
                dying = max(left, key=lambda served: served.engine.num_sessions)
                num_drafted[dying] = dying.method.num_proposals
                left.remove(dying)
                dying.kill()
            return torch.zeros(1, dtype=torch.bool)

        assert generated(demo, CODE_IDS, 60, custom_generate=drafts, stopping_criteria=[kill]) == plain
        assert not left
        assert all(number > 0 for number in num_drafted.values())


@pytest.mark.parametrize(
    "spoil",
    [with_ids(lambda entry: -1 - entry), with_ids(lambda entry: 2**31 - 1), with_ids(lambda entry: (entry + 1) % 9)],
    ids=["negative", "huge", "wrong"],
)
def test_wrong_ids_change_no_token(demo: Any, spoil: Any) -> None:
    method = Method()
    method.spoil = spoil
    with drafter(method) as served, drafts_of(demo, served.address) as drafts:
        assert generated(demo, CODE_IDS, 30, custom_generate=drafts) == generated(demo, CODE_IDS, 30)
        assert method.num_proposals > 0


def test_the_last_token_fits(tiny: Any) -> None:
    """A text ends where max_new_tokens says, however long the draft is."""
    with drafter() as served, drafts_of(tiny, served.address, num_draft_tokens=8) as drafts:
        for num_tokens in (1, 2, 3):
            assert len(generated(tiny, PROMPT, num_tokens, custom_generate=drafts)) == num_tokens


def law_of(model: Any, num_tokens: int) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of the prompt, by enumeration."""
    law = {}
    for tokens in itertools.product(range(VOCAB_SIZE), repeat=num_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0].double()
        probs = logits.softmax(-1)
        law[tokens] = float(
            torch.stack([probs[len(PROMPT) - 1 + place, token] for place, token in enumerate(tokens)]).prod()
        )
    return law


def p_value(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Of the chi-square test; cells with fewer than five expected draws are one."""
    total = counts.total()
    large = [cell for cell, prob in law.items() if prob * total >= 5]
    cells = [(counts[cell], law[cell] * total) for cell in large]
    seen, expected = map(sum, zip(*cells, strict=True))
    cells.append((total - seen, total - expected))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


@pytest.mark.storm
def test_the_law_at_temperature_1_is_the_model_s(tiny: Any) -> None:
    law = law_of(tiny, 3)
    assert sum(law.values()) == pytest.approx(1)
    torch.manual_seed(11)
    counts: Counter[tuple[int, ...]] = Counter()
    with drafter() as served, drafts_of(tiny, served.address) as drafts, counted_forwards(tiny) as rows:
        for _ in range(3000):
            options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "custom_generate": drafts}
            counts[tuple(generated(tiny, PROMPT, 3, **options))] += 1
    assert len(rows) < 0.95 * 3 * counts.total()  # drafts were accepted
    assert p_value(counts, law) > 1e-3
    # The test sees a law that is off by little.
    drafted, other = (3, 4, 0), max(law, key=lambda cell: law[cell])
    assert drafted != other
    moved = dict(law)
    moved[drafted] += 0.25 * law[other]
    moved[other] -= 0.25 * law[other]
    assert p_value(counts, moved) < 1e-6
