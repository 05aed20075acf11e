"""Taking up a step, and what of a late proposal may still be used."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.sampling.laws import LogitsProcessor
from outrider.shared.errors import CommitRefused, InvalidRequest
from outrider.shared.messages import LAW_TOTAL, Proposal, SparseLaw, VerifyStep
from outrider.shared.sampling_params import SamplingParams
from outrider.verifier_service.session import VerifierSession, reconcile
from tests.verifier_service.engine_client import make_spec


def make_session(prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = ()) -> VerifierSession:
    params = SamplingParams(temperature=0.0)
    return VerifierSession(
        spec=make_spec(prompt, params, epoch=4),
        processor=LogitsProcessor(params, prompt, ()),
        on_reply=lambda _reply: None,
        opened_at=0.0,
        token_ids=[*prompt, *output],
    )


def test_lengths_count_from_the_prompt() -> None:
    session = make_session((1, 2, 3), (7, 8))
    assert (session.prompt_len, session.committed_len, session.output_token_ids) == (3, 2, [7, 8])
    session.num_computed = 4
    assert session.num_pending == 1


@pytest.mark.parametrize("epoch", [3, 5])
def test_other_epochs_are_refused(epoch: int) -> None:
    session = make_session()
    with pytest.raises(CommitRefused):
        session.begin(VerifyStep(epoch, 0))
    assert session.step is None


def test_a_gap_is_refused_and_what_lies_before_the_end_is_not() -> None:
    session = make_session(output=(7, 8))
    with pytest.raises(InvalidRequest):
        session.begin(VerifyStep(4, 3))
    for base_len in (2, 1, 0):
        session.begin(VerifyStep(4, base_len))
        assert session.step == VerifyStep(4, base_len)


def test_only_a_step_without_a_proposal_runs_free() -> None:
    session = make_session()
    session.begin(VerifyStep(4, 0, None, 9))
    assert session.free_run_left == 9
    session.begin(VerifyStep(4, 0, Proposal(0, (5,), "x"), 9))
    assert session.free_run_left == 0


tokens = st.lists(st.integers(0, 2), max_size=7).map(tuple)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(tokens, st.integers(-3, 8), tokens, st.booleans(), st.booleans())
def test_reconcile_against_its_definition(
    output: tuple[int, ...], base_len: int, drafted: tuple[int, ...], is_tree: bool, has_laws: bool
) -> None:
    """At absolute index i stands drafted[i - base_len]; it must equal the output where both have a token."""
    law = SparseLaw((0, 1, 2), (1, 1, LAW_TOTAL - 2))
    proposal = Proposal(
        base_len,
        drafted,
        "x",
        parents=tuple(range(-1, len(drafted) - 1)) if is_tree else (),
        laws=(law,) * len(drafted) if has_laws else (),
        confidence=bytes(range(len(drafted))),
    )
    found = reconcile(proposal, len(output), list(output))
    if base_len == len(output):
        assert found == proposal
        return
    passed = len(output) - base_len
    agrees = (
        0 < passed < len(drafted)
        and base_len >= 0
        and all(output[index] == drafted[index - base_len] for index in range(base_len, len(output)))
    )
    if not agrees or (is_tree and drafted):
        assert found is None
    else:
        assert found == dataclasses.replace(
            proposal,
            base_len=len(output),
            token_ids=drafted[passed:],
            laws=proposal.laws[passed:],
            confidence=proposal.confidence[passed:],
        )
