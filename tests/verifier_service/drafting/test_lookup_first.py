"""What a text repeats is drafted in place of another method's draft where it promises more, as `auto` has it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

import pytest

from outrider.drafting.methods.suffix import SuffixMethod, SuffixSettings
from outrider.engine.sampling.laws import LogitsProcessor
from outrider.shared.messages import AutoDrafts, Commit, DraftMethodInfo, LocalDrafts, TokenOrigin, VerifyStep
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.verifier_service.auto_drafting import AutoDrafting
from outrider.verifier_service.draft_length.choice import Choice, DraftLength
from outrider.verifier_service.local_drafting import LocalDrafting
from outrider.verifier_service.session import LookupFirst, VerifierSession
from outrider.verifier_service.timing.gathering import LastRound
from outrider.verifier_service.timing.step_costs import StepCosts
from tests.grid.pools import ROOMY_BLOCKS, Pools
from tests.verifier_service.drafting.spy_method import Spy
from tests.verifier_service.drafting.test_local_drafting import (
    GREEDY,
    SAMPLED,
    WHOLE,
    decode,
    drafting_pool,
    long_prompt,
    spec_of,
)
from tests.verifier_service.engine_client import Session, make_spec, tokens_of

SETTINGS = SuffixSettings(24, 100, 10_000, 1.0, 0.1)
GUESS = (60, 61)


def drafting_of(lookup: LookupFirst | None, tokens: tuple[int, ...]) -> tuple[VerifierSession, Spy]:
    """A session whose round has been drafted for with "spy", after what `lookup` allows."""
    spy = Spy(lambda _session: GUESS)
    drafting = LocalDrafting(
        {"spy": spy, "suffix": SuffixMethod(SETTINGS)},
        max_model_len=1_000,
        read_rows=lambda _sessions, _layers: [],
        before_reading=lambda: None,
    )
    params = SamplingParams(temperature=0.0, max_tokens=100)
    spec = make_spec(tokens, params)
    session = VerifierSession(spec, LogitsProcessor(params, tokens, ()), lambda _reply: None, 0.0, list(tokens))
    session.begin(VerifyStep(spec.epoch, 0, max_new_tokens=100, auto_drafts=AutoDrafts(4)))
    session.num_computed = len(tokens) - 1
    session.auto_choice, session.lookup_first = LocalDrafts("spy", 2), lookup
    drafting.draft([session])
    return session, spy


@pytest.mark.parametrize(
    ("lookup", "tokens", "drafted"),
    [
        (LookupFirst(4, 0.5), (1, 2, 3, 4, 5, 1, 2, 3), ("suffix", (4, 5, 1))),
        (LookupFirst(2, 0.5), (1, 2, 3, 4, 5, 1, 2, 3), ("suffix", (4, 5))),
        (LookupFirst(4, 3.0), (1, 2, 3, 4, 5, 1, 2, 3), ("spy", GUESS)),  # three tokens promise less than three
        (LookupFirst(4, 0.5), (1, 2, 3, 4, 5, 3), ("spy", GUESS)),  # one token's match is chance
        (LookupFirst(4, 0.5), (1, 2, 3, 4), ("spy", GUESS)),
        (None, (1, 2, 3, 4, 5, 1, 2, 3), ("spy", GUESS)),
    ],
)
def test_the_draft_that_promises_more_is_made(
    lookup: LookupFirst | None, tokens: tuple[int, ...], drafted: tuple[str, tuple[int, ...]]
) -> None:
    session, spy = drafting_of(lookup, tokens)
    draft = session.local_draft
    assert draft is not None
    assert draft.proposal is not None
    assert (draft.asked.method, draft.proposal.token_ids) == drafted
    assert len(spy.batches) == (drafted[0] == "spy")


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_head_and_lookups_take_turns_and_no_token_changes(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    """The head reads what it has missed; from a request's second time on, the suffix knows all of its output."""

    def decide(policy: DraftLength, limits: Mapping[str, int]) -> Choice:
        policy.now = Choice("eagle3", min(2, limits["eagle3"]))
        return policy.now

    monkeypatch.setattr(DraftLength, "decide", decide)
    expected = [session.output for session in decode(pools.pool("whole", ROOMY_BLOCKS), params, None, WHOLE)]
    with drafting_pool(pools, ("eagle3", "suffix")) as pool:
        for num_time in range(2):
            drafted: Counter[str] = Counter()
            for key, right in enumerate(expected):
                spec = spec_of(key, params, SpeculationMode.EXACT, long_prompt(key))
                with Session(pool.engine, spec) as session:
                    commits = session.step(0, None, WHOLE, epoch=0, auto=AutoDrafts(4))
                assert list(tokens_of(commits)) == right
                for commit in commits:
                    drafted[commit.local_drafts.method if commit.local_drafts else ""] += commit.num_draft_tokens
            assert drafted["eagle3"] > 0
            assert num_time == 0 or drafted["suffix"] > 2 * drafted["eagle3"]


def test_a_find_counts_for_the_choice_that_it_replaces() -> None:
    methods = {name: DraftMethodInfo(name=name) for name in ("spy", "suffix")}
    auto = AutoDrafting(StepCosts([(1, 0.001), (64, 0.01)]), methods, 1_000)
    session, _ = drafting_of(LookupFirst(4, 0.5), (1, 2, 3, 4, 5, 1, 2, 3))
    commit = Commit(4, 0, (4, 5, 1, 9), (TokenOrigin.ACCEPTED,) * 3 + (TokenOrigin.BONUS,), num_draft_tokens=3)
    auto.committed(session, dataclasses.replace(commit, num_accepted_tokens=3))
    auto.observe(1, 1, LastRound(4, 0.01), 0.001)
    assert auto._policy._of("spy").tokens(2)[2] > auto._policy._of("suffix").tokens(2)[2]
    assert not auto._policy._of("suffix").is_known
