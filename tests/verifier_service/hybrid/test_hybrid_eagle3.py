"""An EAGLE-3 head on a target with recurrent layers accepts what was foretold: in an undisturbed session, at another
verifier that takes it over, from a cached prefix, and after preemptions.

Oracle: the head's objective in training, over the text and with hidden states of transformers' own forward, says for
every position which tokens are drafted there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from models.make.agreement import load_for_measuring
from outrider.drafting.methods.interface import DraftMethod
from outrider.shared.messages import Commit, LocalDrafts, SessionSpec
from outrider.shared.sampling_params import SamplingParams
from outrider.training.frozen_target import FrozenTarget
from outrider.training.replay import head_drafter
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.engine import VerifierEngine
from outrider.verifier_service.local_methods import build_local_methods
from tests.verifier_service.engine_client import EngineShape, Session, generate, make_spec, running_engine, tokens_of
from tests.verifier_service.served_target import Served, served

MODELS = Path(__file__).parents[3] / "models"
HYBRID, HEAD = MODELS / "demo-hybrid", MODELS / "demo-hybrid-eagle3"
DRAFT_LEN, NUM_TOKENS = 3, 48
LOCAL = LocalDrafts("eagle3", DRAFT_LEN)
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
TEXTS = ("import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):", "def add(a, b):\n    return a")
# of the rounds: near ties between two guesses, which float32 sums in another order may decide otherwise
MOST_OTHERWISE = 0.1

# (prompt, output, rounds) -> checks
Check = Callable[[tuple[int, ...], tuple[int, ...], list[Commit]], None]


@pytest.fixture(scope="module")
def hybrid() -> Served:
    return served(HYBRID, ("eagle3",))


@pytest.fixture
def methods(hybrid: Served) -> dict[str, DraftMethod]:
    settings = {"local_draft_model": (str(HEAD),), "local_methods": ("eagle3",), "dtype": "float32", "num_threads": 1}
    return build_local_methods(
        VerifierConfig(model=hybrid.loaded.path, **settings), hybrid.loaded, logging.getLogger(__name__)
    )


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.from_file(str(HYBRID / "tokenizer.json"))
    return [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in TEXTS]


@pytest.fixture(scope="module")
def check() -> Check:
    target = FrozenTarget(HYBRID, torch.float32)
    head: Any = load_for_measuring(HEAD, target)
    guesses_of = head_drafter(head.head, target)

    def check(prompt: tuple[int, ...], output: tuple[int, ...], rounds: list[Commit]) -> None:
        text = [*prompt, *output]
        propose, num_otherwise, num_drafted = guesses_of(text, len(prompt)), 0, 0
        for commit in rounds:
            if not commit.num_draft_tokens:
                continue
            start = len(prompt) + commit.base_len
            guesses, foretold = propose(text[:start], commit.num_draft_tokens), 0
            while foretold < len(guesses) and guesses[foretold] == text[start + foretold]:
                foretold += 1
            num_otherwise += foretold != commit.num_accepted_tokens
            num_drafted += 1
        # Of all but the first round and one beside a preemption.
        assert num_drafted >= len(rounds) - 4
        assert num_otherwise <= max(1, MOST_OTHERWISE * num_drafted), [
            (commit.base_len, commit.num_accepted_tokens) for commit in rounds
        ]

    return check


def decode(engine: VerifierEngine, spec: SessionSpec) -> list[Commit]:
    with Session(engine, spec) as session:
        return session.step(len(spec.committed_token_ids), max_new_tokens=NUM_TOKENS, local=LOCAL)


def num_accepted(commits: list[Commit]) -> int:
    return sum(commit.num_accepted_tokens for commit in commits)


def test_acceptance_is_what_was_foretold_wherever_a_session_goes_on(
    hybrid: Served, methods: dict[str, DraftMethod], prompts: list[tuple[int, ...]], check: Check
) -> None:
    prompt = prompts[0]
    with running_engine(hybrid.loaded, hybrid.certificate, EngineShape(num_blocks=400), methods) as engine:
        plain = tokens_of(generate(engine, make_spec(prompt, PARAMS)))
        whole = decode(engine, make_spec(prompt, PARAMS, cache_salt="fresh"))
        hit = decode(engine, make_spec(prompt, PARAMS, cache_salt="fresh"))
        assert hit[0].num_cached_tokens > 0
        assert tokens_of(whole) == tokens_of(hit) == plain
        for rounds in (whole, hit):
            check(prompt, plain, rounds)
            assert num_accepted(rounds) > NUM_TOKENS / 3
        for cut in (5, 21, 34):
            # As another verifier: nothing of the session is cached under this salt.
            spec = make_spec(prompt, PARAMS, committed=plain[:cut], epoch=2, cache_salt=f"taken over {cut}")
            rounds = decode(engine, spec)
            assert tokens_of(rounds) == plain[cut:]
            check(prompt, plain, rounds)
            before = num_accepted([commit for commit in whole if commit.base_len >= cut])
            assert num_accepted(rounds) >= before - DRAFT_LEN, "a round is without a draft, and ends another way"


@pytest.mark.storm
@pytest.mark.parametrize(("num_blocks", "num_slots"), [(48, 40), (400, 3)])
def test_acceptance_of_preempted_sessions(
    hybrid: Served,
    methods: dict[str, DraftMethod],
    prompts: list[tuple[int, ...]],
    check: Check,
    num_blocks: int,
    num_slots: int,
) -> None:
    """For blocks, of which one session takes 18, and for slots of recurrent states; the head's own rows stay."""
    with running_engine(hybrid.loaded, hybrid.certificate, EngineShape(num_blocks=400), methods) as engine:
        plain = [tokens_of(generate(engine, make_spec(prompt, PARAMS))) for prompt in prompts]
    shape = EngineShape(num_blocks=num_blocks, num_slots=num_slots, prefill_chunk_size=16)
    with (
        running_engine(hybrid.loaded, hybrid.certificate, shape, methods) as engine,
        ThreadPoolExecutor(4) as executor,
    ):
        specs = [replace(make_spec(prompts[place % 2], PARAMS), session_id=f"s{place}") for place in range(4)]
        found = list(executor.map(lambda spec: decode(engine, spec), specs))
        assert engine.rounds.scheduler.num_preemptions > 0
    for place, rounds in enumerate(found):
        assert tokens_of(rounds) == plain[place % 2]
        check(prompts[place % 2], plain[place % 2], rounds)
