"""Rejection mode over every method's real proposals: verifier's engine, drafter's methods, the wire's bytes between.

A tiny random target of 13 tokens, so that the law of the first two tokens can be counted: against transformers' own
probabilities, by chi-square. What a broken rule looks like is in acceptance/test_mutants; here one mutant shows that
these counts are enough to see one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from outrider.drafting.growth import draft as growth
from outrider.drafting.methods.interface import DraftMethod
from outrider.shared.messages import SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from tests.grid.driver import Driver, Session
from tests.grid.heads import HEADS
from tests.grid.models import GridModel
from tests.grid.pools import ROOMY_BLOCKS, Pools
from tests.verifier_service.acceptance.toy import SMALLEST_P_VALUE, chi_square_p_value
from tests.verifier_service.drafting.drafting_pair import (
    LAW_PROMPT,
    LAW_VOCAB_SIZE,
    build_method,
    law_of_two_tokens,
    save_pair,
)

pytestmark = pytest.mark.storm

# Room for a whole block; two tokens are looked at.
PARAMS = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
NUM_SESSIONS = 1_280
AT_ONCE = 64
TREES = ("draft_model", *HEADS)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> GridModel:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def pools(checkpoints: GridModel) -> Iterator[Pools]:
    opened = Pools(checkpoints, num_threads=1)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def law_of_two(checkpoints: GridModel) -> np.ndarray:
    return law_of_two_tokens(checkpoints.target)


def sample(pools: Pools, method: DraftMethod, tree: bool, stream: int) -> tuple[np.ndarray, int, int]:
    """Counts of the first two tokens, and how many draft tokens were scored and accepted."""
    driver = Driver(pools.pool("whole", ROOMY_BLOCKS))
    counts = np.zeros(LAW_VOCAB_SIZE * LAW_VOCAB_SIZE, dtype=np.int64)
    num_drafted = num_accepted = 0
    for start in range(0, NUM_SESSIONS, AT_ONCE):
        sessions = []
        for index in range(start, start + AT_ONCE):
            key = (stream << 32) + index
            spec = SessionSpec(f"s{key}", 0, LAW_PROMPT, (), PARAMS, SpeculationMode.REJECTION, stream_key=key)
            sessions.append(Session(spec, method, gamma=3, free_run=1, tree=tree, enough=2))
        driver.run(sessions)
        for session in sessions:
            assert not session.failure
            counts[session.output[0] * LAW_VOCAB_SIZE + session.output[1]] += 1
            num_drafted += session.num_draft_tokens
            num_accepted += session.num_accepted_tokens
    return counts, num_drafted, num_accepted


CASES = [(name, tree) for name in ("ngram", "suffix", *TREES) for tree in (False, True) if tree <= (name != "ngram")]


@pytest.mark.parametrize(("name", "tree"), CASES)
def test_every_method_keeps_the_targets_law(pools: Pools, law_of_two: np.ndarray, name: str, tree: bool) -> None:
    counts, num_drafted, num_accepted = sample(pools, build_method(name, pools), tree, stream=CASES.index((name, tree)))
    assert num_drafted > NUM_SESSIONS
    assert num_accepted > NUM_SESSIONS // 20
    assert chi_square_p_value(counts, law_of_two) > SMALLEST_P_VALUE


def test_drafts_ranked_instead_of_drawn_would_show(
    pools: Pools, law_of_two: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: the likeliest tokens of the law are sent as if they had been drawn from it."""
    monkeypatch.setattr(growth, "draw_distinct", lambda law, count, _rng: list(law.token_ids[:count]))
    counts, _, _ = sample(pools, build_method("draft_model", pools), tree=False, stream=99)
    assert chi_square_p_value(counts, law_of_two) < SMALLEST_P_VALUE
