"""Heads are chosen by what they brought to sessions that begin alike. Acceptance here is drawn, not measured."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from outrider.drafting.serving import head_choice
from outrider.drafting.serving.head_choice import HeadChoice
from outrider.shared.messages import SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode

DOMAINS = ("code", "docs", "tests", "chat")
# Of a head on its own domain, and on another one: as heads of one domain were measured (docs/drafters.md).
OWN, OTHER = 0.6, 0.45
ROUND_TOKENS = 3
SESSION_TOKENS = 200


def spec_of(prompt: tuple[int, ...], salt: str = "") -> SessionSpec:
    return SessionSpec("s", 1, prompt, (), SamplingParams(temperature=0.0), SpeculationMode.EXACT, 0, cache_salt=salt)


def system_prompt(domain: int, length: int, rng: random.Random) -> tuple[int, ...]:
    """The same beginning of a template, a system prompt of the domain, and a question of its own."""
    return (1, 2, 3, 4, *(1000 + domain for _ in range(length)), *(rng.randrange(1000) for _ in range(100)))


def serve(
    choice: HeadChoice, spec: SessionSpec, domain: int, rng: random.Random, spread: float = 0.08
) -> tuple[str, float]:
    """One session of SESSION_TOKENS. Returns its head, and its expected tokens a round.

    spread: of acceptance between the sessions of a domain.
    """
    name = choice.choose(spec)
    chance = min(0.95, max(0.05, rng.gauss(OWN if DOMAINS[domain] == name else OTHER, spread)))
    num_tokens = num_accepted = num_wrong = 0
    while num_tokens < SESSION_TOKENS:
        accepted = next((place for place in range(ROUND_TOKENS) if rng.random() > chance), ROUND_TOKENS)
        num_accepted += accepted
        num_wrong += accepted < ROUND_TOKENS
        num_tokens += 1 + accepted
    choice.observe(spec, name, num_accepted, num_wrong)
    chance = OWN if DOMAINS[domain] == name else OTHER
    return name, sum(chance**place for place in range(ROUND_TOKENS + 1))


@pytest.mark.parametrize("told_by", ["salt", "short system prompt", "long system prompt"])
def test_after_4000_tokens_a_domain_is_within_2_percent_of_its_best_head(told_by: str) -> None:
    best = sum(OWN**place for place in range(ROUND_TOKENS + 1))
    rates = []
    for seed in range(10):
        rng, choice = random.Random(seed), HeadChoice(DOMAINS)
        choice._random = random.Random(100 + seed)
        found: dict[int, list[float]] = {domain: [] for domain in range(len(DOMAINS))}
        for number in range(len(DOMAINS) * 80):
            domain = number % len(DOMAINS)
            if told_by == "salt":
                spec = spec_of(tuple(rng.randrange(1000) for _ in range(50)), salt=DOMAINS[domain])
            else:
                length = 20 if told_by == "short system prompt" else 300
                spec = spec_of(system_prompt(domain, length, rng))
            found[domain].append(serve(choice, spec, domain, rng)[1])
        first = 4000 // SESSION_TOKENS
        rates += [sum(values[first:]) / len(values[first:]) for values in found.values()]
    assert sum(rates) / len(rates) > 0.98 * best
    assert sum(rate > 0.95 * best for rate in rates) > 0.9 * len(rates)


def test_one_domain_alone_finds_its_head_without_any_beginning_in_common() -> None:
    rng, choice = random.Random(0), HeadChoice(DOMAINS)
    heads = [serve(choice, spec_of(tuple(rng.randrange(10_000) for _ in range(60))), 2, rng)[0] for _ in range(100)]
    assert Counter(heads[20:])["tests"] > 70


def test_text_that_differs_from_session_to_session_takes_longer_but_misleads_nobody() -> None:
    shares = []
    for seed in range(10):
        rng, choice, spec = random.Random(seed), HeadChoice(DOMAINS), spec_of(tuple(range(50)))
        heads = [serve(choice, spec, 1, rng, spread=0.3)[0] for _ in range(400)]
        shares.append(heads[200:].count("docs") / 200)
        assert 0.2 < choice._alike < 0.5  # spread 0.3 at acceptance 0.5: 0.09 / 0.25, less what is cut off
    assert sum(shares) / len(shares) > 0.75
    assert min(shares) > 0.4


def test_it_follows_a_head_that_turns_bad() -> None:
    rng, choice, spec = random.Random(0), HeadChoice(DOMAINS), spec_of(tuple(range(50)))
    for _ in range(60):
        serve(choice, spec, 0, rng)
    heads = [serve(choice, spec, 3, rng)[0] for _ in range(120)]
    assert Counter(heads[60:])["chat"] > 40


def test_salts_are_apart() -> None:
    prompt = tuple(range(50))
    choice = HeadChoice(("good", "bad"))
    for _ in range(200):
        choice.observe(spec_of(prompt, "tenant"), "bad", 10, 0)
        choice.observe(spec_of(prompt, "tenant"), "good", 0, 10)
    assert Counter(choice.choose(spec_of(prompt, "tenant")) for _ in range(100))["bad"] == 100
    untouched = HeadChoice(("good", "bad"))
    for spec in (spec_of(prompt), spec_of(prompt, "other")):
        drawn = [[each.choose(spec) for _ in range(50)] for each in (choice, untouched)]
        assert Counter(drawn[0])["good"] > 10
        assert Counter(drawn[1])["good"] > 10


def test_nothing_is_learned_from_seeded_sessions_in_rejection_mode() -> None:
    seeded = SamplingParams(temperature=1.0, seed=3)
    rejection = replace(spec_of((1,) * 20), sampling_params=seeded, mode=SpeculationMode.REJECTION)
    choice, fresh = HeadChoice(DOMAINS), HeadChoice(DOMAINS)
    for _ in range(100):
        choice.observe(rejection, "docs", 100, 0)
    assert [choice.choose(rejection) for _ in range(50)] == [fresh.choose(rejection) for _ in range(50)]
    choice.observe(replace(rejection, mode=SpeculationMode.EXACT), "docs", 100, 0)
    assert Counter(choice.choose(rejection) for _ in range(50))["docs"] > 30


def test_a_head_that_failed_is_not_chosen_and_the_last_one_stays() -> None:
    choice = HeadChoice(DOMAINS)
    for name in DOMAINS:
        choice.drop(name)
    assert {choice.choose(spec_of((1, 2, 3))) for _ in range(50)} == {"chat"}


def test_memory_and_time_do_not_grow_with_what_callers_send() -> None:
    rng, choice = random.Random(0), HeadChoice(DOMAINS)
    for number in range(500):
        choice.observe(spec_of(tuple(rng.randrange(100_000) for _ in range(300)), f"salt {number}"), "docs", 3, 1)
    assert len(choice._drafts) == head_choice._MOST_BEGINNINGS
    long = spec_of(tuple(range(100_000)))
    short = replace(long, prompt_token_ids=long.prompt_token_ids[:256])

    def took_s(spec: SessionSpec) -> float:
        started = time.process_time()
        for _ in range(50):
            choice.observe(spec, choice.choose(spec), 1, 1)
        return time.process_time() - started

    assert min(took_s(long) for _ in range(5)) < 3 * min(took_s(short) for _ in range(5))
