"""Prompt lookup against a brute-force search of the whole context."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafting.methods.ngram import MAX_DRAFT_TOKENS, NgramMethod
from outrider.drafting.session import DraftSession
from outrider.shared.messages import DraftStep, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode

SPEC = SessionSpec("s", 1, (0,), (), SamplingParams(), SpeculationMode.REJECTION, 0, method="ngram")


def make_session(prompt: list[int]) -> DraftSession:
    return DraftSession(replace(SPEC, prompt_token_ids=tuple(prompt)), list(prompt), lambda _reply: None)


def brute_force(token_ids: list[int], lookup_min: int, lookup_max: int, count: int) -> list[int]:
    """The longest suffix that stood earlier, its latest place, and what followed; a loop goes on."""
    for size in range(lookup_max, lookup_min - 1, -1):
        if size > len(token_ids):
            continue
        suffix = token_ids[-size:]
        for start in range(len(token_ids) - size - 1, -1, -1):
            if token_ids[start : start + size] == suffix:
                text = list(token_ids)
                for offset in range(count):
                    text.append(text[start + size + offset])
                return text[len(token_ids) :]
    return []


def propose(method: NgramMethod, session: DraftSession, base_len: int, tokens: list[int], count: int) -> list[int]:
    session.report(DraftStep(1, base_len, tuple(tokens), count))
    (proposal,) = method.propose([session])
    assert proposal.base_len == session.committed_len
    assert (proposal.laws, proposal.parents, proposal.method) == ((), (), "ngram")
    return list(proposal.token_ids)


few_tokens = st.lists(st.integers(0, 2), max_size=5)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.lists(st.tuples(few_tokens, st.integers(0, 6), st.integers(0, 4)), max_size=8),
    st.tuples(st.integers(1, 3), st.integers(0, 3)),
)
def test_against_brute_force(
    prompt: list[int], reports: list[tuple[list[int], int, int]], sizes: tuple[int, int]
) -> None:
    """Reports also overwrite what was reported before: a commit that was lost and made anew."""
    lookup_min, lookup_max = sizes[0], sizes[0] + sizes[1]
    method = NgramMethod(prompt_lookup_min=lookup_min, prompt_lookup_max=lookup_max)
    session = make_session(prompt)
    method.open(session)
    known = list(prompt)
    for tokens, count, taken_back in reports:
        base_len = max(0, len(known) - len(prompt) - taken_back)
        known = known[: len(prompt) + base_len] + tokens
        found = propose(method, session, base_len, tokens, count)
        assert found == brute_force(known, lookup_min, lookup_max, count)
    method.close(session)


def test_two_sessions_do_not_see_each_other() -> None:
    method = NgramMethod(prompt_lookup_min=1, prompt_lookup_max=3)
    first, second = make_session([1, 2, 3, 1]), make_session([9, 8, 1])
    for session in (first, second):
        method.open(session)
        session.report(DraftStep(1, 0, (), 2))
    proposals = method.propose([second, first])
    assert [proposal.token_ids for proposal in proposals] == [(), (2, 3)]
    method.close(first)
    method.close(first)


def test_a_loop_goes_on_and_ends_at_the_longest_draft() -> None:
    method = NgramMethod(prompt_lookup_min=1, prompt_lookup_max=3)
    session = make_session([4, 5, 4, 5])
    method.open(session)
    assert propose(method, session, 0, [], 5) == [4, 5, 4, 5, 4]
    assert len(propose(method, session, 0, [], 10_000)) == MAX_DRAFT_TOKENS


def test_committed_tokens_at_opening_count() -> None:
    method = NgramMethod(prompt_lookup_min=2, prompt_lookup_max=4)
    session = DraftSession(replace(SPEC, prompt_token_ids=(1, 2)), [1, 2, 7, 1, 2], lambda _reply: None)
    method.open(session)
    assert not method.advance(session)
    assert propose(method, session, 3, [], 2) == [7, 1]
