"""What contexts cost is measured, and sessions that come and go do not make rows look dear."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from outrider.engine.attention.block_manager import BlockTable
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from outrider.shared.messages import Proposal
from outrider.verifier_service.scheduler import Work
from outrider.verifier_service.timing import context_costs
from outrider.verifier_service.timing.context_costs import ContextCosts, Contexts, measure_context_costs
from outrider.verifier_service.timing.step_costs import StepCosts
from tests.verifier_service.engine_client import make_session

TABLE = [(1, 0.009), (16, 0.011), (32, 0.015), (64, 0.023), (96, 0.033)]
COSTS = ContextCosts(token_s=2.5e-6, pair_s=2e-7)


def work(context_len: int, num_chain_rows: int = 1, num_draft_tokens: int = 0) -> Work:
    proposal = Proposal(0, (1,) * num_draft_tokens, "x") if num_draft_tokens else None
    return Work(make_session(num_computed=context_len), BlockTable(), num_chain_rows, proposal, 1)


def test_contexts_are_counted_once_and_once_for_each_row() -> None:
    assert Contexts.of([work(100), work(50, num_draft_tokens=3)]) == Contexts(150, 100 + 4 * 50)
    assert Contexts.of([work(100), work(64, num_chain_rows=32)]) == Contexts(164, 164), "rows of a prompt share"
    assert Contexts.of([]) == Contexts(0, 0)
    assert COSTS.seconds(Contexts(1000, 3000)) == pytest.approx(0.0025 + 0.0006)


def rounds(num_draft_tokens: Sequence[int], num_rounds: int = 400) -> StepCosts:
    """10 to 16 sessions of 200 to 400 tokens, whose forwards take what the costs say and a tenth more."""
    costs, rng = StepCosts(TABLE, COSTS), random.Random(0)
    table = StepCosts(TABLE)
    for index in range(num_rounds):
        num_sessions, length = rng.randint(10, 16), num_draft_tokens[index % len(num_draft_tokens)]
        lengths = [rng.randint(200, 400) for _ in range(num_sessions)]
        contexts = Contexts(sum(lengths), sum(lengths) * (1 + length))
        num_rows = num_sessions * (1 + length)
        costs.observe(num_rows, 1.1 * (table.seconds(num_rows) + COSTS.seconds(contexts)), contexts)
    return costs


@pytest.mark.parametrize("num_draft_tokens", [(0,), (1,), (3,), (0, 1, 3)])
def test_sessions_that_come_and_go_leave_the_price_of_a_draft_alone(num_draft_tokens: Sequence[int]) -> None:
    """As if rows were all that a session costs, drafts looked 1.6 to 2.8 times as dear as they are."""
    costs, table = rounds(num_draft_tokens), StepCosts(TABLE)
    for length in (1, 3, 5):
        true_s = 1.1 * (table.seconds(16 * (1 + length)) - table.seconds(16) + 13 * 300 * length * COSTS.pair_s)
        assert costs.drafts_s(16, length) == pytest.approx(true_s, rel=0.05)


def test_a_forward_is_foretold_with_contexts_as_they_are() -> None:
    costs = rounds((3,))
    mean = Contexts(13 * 300, 4 * 13 * 300)
    assert costs.seconds(52) == pytest.approx(1.1 * (StepCosts(TABLE).seconds(52) + COSTS.seconds(mean)), rel=0.05)


def test_a_real_model_is_measured() -> None:
    loaded = load_model("models/demo-target")
    runner = ModelRunner(loaded, loaded.make_cache(320, 16), graphs=True)
    costs = measure_context_costs(runner, 320, 16)
    assert costs.token_s + costs.pair_s > 0.0
    assert costs.token_s >= 0.0 <= costs.pair_s


def test_a_forward_that_takes_long_holds_up_no_start(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_costs, "_BUDGET_S", 0.0)
    runner = ModelRunner(loaded, loaded.make_cache(320, 16))
    assert measure_context_costs(runner, 320, 16) == ContextCosts()


def test_of_a_cache_that_is_too_small_nothing_is_known(loaded: LoadedModel) -> None:
    assert measure_context_costs(ModelRunner(loaded, loaded.make_cache(10, 4)), 10, 4) == ContextCosts()
