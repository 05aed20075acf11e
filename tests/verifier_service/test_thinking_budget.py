"""A thinking budget on a real engine: the output is that of plain decoding, forced by hand at the budget's border."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from outrider.shared.messages import Commit
from outrider.shared.sampling_params import SamplingParams, SpeculationMode, ThinkingBudget
from outrider.verifier_service.engine import VerifierEngine
from tests.verifier_service.drafts import drafts_for, oracle_draft
from tests.verifier_service.engine_client import PARAMS, PROMPT, generate, make_spec, tokens_of


def forced(engine: VerifierEngine, params: SamplingParams, free: tuple[int, ...], budget: int) -> ThinkingBudget:
    """A budget with an end token that the model does not write by itself."""
    with_end = generate(engine, make_spec(PROMPT, params, committed=free[:budget]))
    end = next(token for token in range(3, 60) if token not in (*free, *tokens_of(with_end)))
    return ThinkingBudget(budget, end, starts_open=True)


@pytest.mark.parametrize("name", ["greedy", "sampled"])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_drafts_and_takeovers_around_the_border_change_nothing(
    engine: VerifierEngine, truth: Callable[[str, int], list[Commit]], name: str, budget: int
) -> None:
    plain = PARAMS[name]
    free = tokens_of(truth(name, 0))
    thinking = forced(engine, plain, free, budget)
    begun = (*free[:budget], thinking.end_token_id)
    right = begun + tokens_of(generate(engine, make_spec(PROMPT, plain, committed=begun)))
    assert right != free
    params = replace(plain, thinking_budget=thinking)
    assert tokens_of(generate(engine, make_spec(PROMPT, params))) == right
    assert tokens_of(generate(engine, make_spec(PROMPT, params), free_run=7)) == right
    drafts = drafts_for(right) | {f"free {length}": oracle_draft(free, length) for length in range(1, 9)}
    for kind, draft in drafts.items():
        assert tokens_of(generate(engine, make_spec(PROMPT, params), draft)) == right, kind
    for cut in range(budget + 3):
        spec = make_spec(PROMPT, params, committed=right[:cut], epoch=2)
        assert tokens_of(generate(engine, spec, oracle_draft(free, 8))) == right[cut:], cut


def test_rejection_never_thinks_longer(engine: VerifierEngine, truth: Callable[[str, int], list[Commit]]) -> None:
    free = tokens_of(truth("sampled", 0))
    thinking = ThinkingBudget(3, end_token_id=9, starts_open=True)
    params = replace(PARAMS["sampled"], thinking_budget=thinking)
    for stream_key in range(8):
        spec = make_spec(PROMPT, params, SpeculationMode.REJECTION, stream_key=stream_key)
        assert 9 in tokens_of(generate(engine, spec, oracle_draft(free, 6)))[:4]
