"""Suffix decoding against a brute-force search, its limits, and through the drafter's engine and the wire."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from outrider.drafter_service.config import DrafterConfig
from outrider.drafter_service.engine import DrafterEngine
from outrider.drafter_service.metrics import DrafterMetrics
from outrider.drafting.methods.registry import build_methods
from outrider.drafting.methods.suffix import (
    CATCH_UP_TOKENS,
    MAX_DRAFT_TOKENS,
    MAX_TREE_NODES,
    SuffixMethod,
    SuffixSettings,
)
from outrider.drafting.session import DraftSession
from outrider.shared import wire
from outrider.shared.messages import DraftStep, Proposal, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from tests.drafter_service.test_engine import Client, until
from tests.drafting.suffix.suffix_oracle import Chain, PieceCounts, chain_after, path_probs

SPEC = SessionSpec("s", 1, (0,), (), SamplingParams(), SpeculationMode.REJECTION, 0, method="suffix")
SETTINGS = SuffixSettings(
    max_tree_depth=24, max_cached_requests=100, max_cached_nodes=100_000, max_spec_factor=1.0, min_token_prob=0.1
)
few_tokens = st.lists(st.integers(0, 2), max_size=6)
# Short ones that shrink well, and long ones in which everything is followed by everything.
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12) | st.integers(0, 2**32).map(
    lambda seed: random.Random(seed).choices(range(4), weights=[5, 3, 2, 1], k=60)
)
Report = tuple[list[int], int, int]
report_lists = st.lists(st.tuples(few_tokens, st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=5)
past_texts = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=20), max_size=3)
some_settings = st.builds(
    replace,
    st.just(SETTINGS),
    max_tree_depth=st.integers(2, 8),
    max_spec_factor=st.sampled_from([0.5, 1.0, 1.7, 4.0]),
    min_token_prob=st.sampled_from([0.0, 0.1, 0.3, 0.5]),
)


def make_session(prompt: Sequence[int], session_id: str = "s", cache_salt: str = "") -> DraftSession:
    spec = replace(SPEC, session_id=session_id, cache_salt=cache_salt, prompt_token_ids=tuple(prompt))
    return DraftSession(spec, list(prompt), lambda _reply: None)


def leave_text(method: SuffixMethod, session_id: str, output: Sequence[int], cache_salt: str = "") -> None:
    """A session that writes `output` and ends."""
    session = make_session([9], session_id, cache_salt)
    method.open(session)
    session.report(DraftStep(1, 0, tuple(output), 0))
    method.close(session)


def propose(method: SuffixMethod, session: DraftSession, step: DraftStep) -> Proposal:
    session.report(step)
    (proposal,) = method.propose([session])
    assert (proposal.base_len, proposal.laws, proposal.method) == (session.committed_len, (), "suffix")
    assert len(proposal.confidence) == len(proposal.token_ids)
    return proposal


def reported(known: list[int], prompt_len: int, report: Report) -> tuple[list[int], DraftStep]:
    """The text after a report, which may take back and overwrite, and the report."""
    tokens, count, taken_back = report
    base_len = max(0, len(known) - prompt_len - taken_back)
    return known[: prompt_len + base_len] + tokens, DraftStep(1, base_len, tuple(tokens), count)


def room(limits: SuffixSettings, match_len: int, num_draft_tokens: int) -> int:
    return min(num_draft_tokens, int(match_len * limits.max_spec_factor), limits.max_tree_depth - match_len)


def best_chain(sources: Sequence[PieceCounts], text: list[int], limits: SuffixSettings, count: int) -> Chain:
    """The best score over all suffixes; of equal ones the first source's, and there the longest match's."""
    best = Chain()
    for pieces in sources:
        for length in range(min(len(text), limits.max_tree_depth - 1), 0, -1):
            found = chain_after(pieces, tuple(text[-length:]), room(limits, length, count), limits.min_token_prob)
            best = found if found.score > best.score else best
    return best


@settings(max_examples=300, deadline=None, derandomize=True)
@given(prompts, report_lists, past_texts, some_settings)
def test_chains_against_brute_force(
    prompt: list[int], reports: list[Report], past: list[list[int]], limits: SuffixSettings
) -> None:
    method = SuffixMethod(limits)
    for index, output in enumerate(past):
        leave_text(method, str(index), output)
    session = make_session(prompt)
    method.open(session)
    text = list(prompt)
    for report in reports:
        text, step = reported(text, len(prompt), report)
        proposal = propose(method, session, step)
        sources = [PieceCounts([text], limits.max_tree_depth), PieceCounts(past, limits.max_tree_depth)]
        expected = best_chain(sources, text, limits, step.num_draft_tokens)
        assert (proposal.token_ids, proposal.parents) == (expected.token_ids, ())
        assert list(proposal.confidence) == [min(255, int(share * 256)) for share in expected.shares]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    prompts,
    report_lists,
    past_texts,
    some_settings,
    st.tuples(st.integers(1, 9), st.sampled_from([0, 0, 2, 3])),
)
def test_trees_against_brute_force(
    prompt: list[int], reports: list[Report], past: list[list[int]], limits: SuffixSettings, size: tuple[int, int]
) -> None:
    """No closed set of as many nodes has a higher score, over all suffixes of the text and both sources."""
    method = SuffixMethod(limits)
    for index, output in enumerate(past):
        leave_text(method, str(index), output)
    session = make_session(prompt)
    method.open(session)
    text = list(prompt)
    max_nodes, max_branches = size
    for report in reports:
        text, step = reported(text, len(prompt), report)
        step = replace(step, max_tree_nodes=max_nodes, max_branches=max_branches)
        proposal = propose(method, session, step)
        paths = tree_paths(proposal)
        assert len(paths) <= max_nodes
        assert all(0 < len(path) <= step.num_draft_tokens for path in paths)
        if max_branches:
            assert max((sum(path[:-1] == other[:-1] for other in paths) for path in paths), default=0) <= max_branches
        scores, best_score = [0.0], 0.0
        for pieces in (PieceCounts([text], limits.max_tree_depth), PieceCounts(past, limits.max_tree_depth)):
            for length in range(min(len(text), limits.max_tree_depth - 1), 0, -1):
                depth = room(limits, length, step.num_draft_tokens)
                probs = path_probs(pieces, tuple(text[-length:]), depth, limits.min_token_prob)
                best_score = max(best_score, sum(sorted(probs.values(), reverse=True)[:max_nodes]))
                if paths and all(path in probs for path in paths):
                    scores.append(sum(probs[path] for path in paths))
        if max_branches:
            assert bool(paths) == (best_score > 0)
        else:
            assert max(scores) == pytest.approx(best_score)


def tree_paths(proposal: Proposal) -> list[tuple[int, ...]]:
    """From the committed prefix down to each node; a chain if there are no parents. Checks the form of the tree."""
    parents = proposal.parents or tuple(range(-1, len(proposal.token_ids) - 1))
    assert len(parents) == len(proposal.token_ids)
    paths: list[tuple[int, ...]] = []
    for index, (token, parent) in enumerate(zip(proposal.token_ids, parents, strict=True)):
        assert -1 <= parent < index
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths), "siblings are distinct"
    return paths


def test_a_tree_goes_both_ways_and_crosses_the_wire() -> None:
    method = SuffixMethod(SETTINGS)
    session = make_session([8, 1, 2, 3, 4, 9, 1, 2, 5, 6, 7, 1, 2, 5, 6, 0, 1, 2])
    method.open(session)
    proposal = propose(method, session, DraftStep(1, 0, (), 2, max_tree_nodes=8))
    assert sorted(tree_paths(proposal)) == [(3,), (3, 4), (5,), (5, 6)]
    assert (proposal.token_ids, proposal.parents) == ((5, 6, 3, 4), (-1, 0, -1, 2))
    assert list(proposal.confidence) == [170, 255, 85, 255]
    assert wire.proposal_from_wire(wire.proposal_to_wire(proposal)) == proposal
    assert propose(method, session, DraftStep(1, 0, (), 2, max_tree_nodes=3)).token_ids == (5, 6, 3)
    one_way = propose(method, session, DraftStep(1, 0, (), 2, max_tree_nodes=8, max_branches=1))
    assert (one_way.token_ids, one_way.parents) == ((5, 6), ())


def test_what_counts_is_the_whole_way_down_to_a_token() -> None:
    """After 1, 2: 3 with 0.6 and then 5 or 6 with 0.5 each; or 4 with 0.4 and then always 7."""
    outputs = [[1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 3, 5], [1, 2, 3, 6], *[[1, 2, 4, 7]] * 4]

    def ask(min_token_prob: float, max_tree_nodes: int) -> Proposal:
        method = SuffixMethod(replace(SETTINGS, min_token_prob=min_token_prob))
        for index, output in enumerate(outputs):
            leave_text(method, str(index), output)
        session = make_session([1, 2])
        method.open(session)
        return propose(method, session, DraftStep(1, 0, (), 2, max_tree_nodes=max_tree_nodes))

    assert ask(0.35, 0).token_ids == (3,)
    assert ask(0.3, 0).token_ids == (3, 6)
    assert tree_paths(ask(0.1, 2)) == [(3,), (4,)]
    assert tree_paths(ask(0.1, 3)) == tree_paths(ask(0.35, 8)) == [(3,), (4,), (4, 7)]
    assert tree_paths(ask(0.1, 8)) == [(3,), (4,), (4, 7), (3, 6), (3, 5)]
    assert list(ask(0.1, 8).confidence) == [153, 102, 255, 128, 128]


def test_the_longest_draft() -> None:
    method = SuffixMethod(replace(SETTINGS, max_tree_depth=200, max_spec_factor=4.0, min_token_prob=0.0))
    session = make_session(list(range(100)) * 2)
    method.open(session)
    assert propose(method, session, DraftStep(1, 0, (), 10_000)).token_ids == tuple(range(MAX_DRAFT_TOKENS))
    wide = make_session([token for number in range(1, 200) for token in (0, 0, number)] + [0, 0])
    method.open(wide)
    assert len(propose(method, wide, DraftStep(1, 0, (), 10_000, max_tree_nodes=1_000)).token_ids) == MAX_TREE_NODES
    assert propose(method, wide, DraftStep(1, 0, (), 0)).token_ids == ()


def test_past_outputs_are_proposed_but_never_an_outsiders() -> None:
    method = SuffixMethod(SETTINGS)
    leave_text(method, "mine", [1, 2, 3, 4], "ours")
    leave_text(method, "secret", [1, 2, 77, 78], "theirs")
    leave_text(method, "unsalted", [1, 2, 88, 89])
    expected = {"ours": (3, 4), "theirs": (77, 78), "": (88, 89), "nobody's": ()}
    for salt, continuation in expected.items():
        session = make_session([1, 2], "reader", salt)
        method.open(session)
        assert propose(method, session, DraftStep(1, 0, (), 2)).token_ids == continuation
        tree = propose(method, session, DraftStep(1, 0, (), 2, max_tree_nodes=64))
        assert set(tree.token_ids) == set(continuation)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), few_tokens), min_size=1, max_size=12))
def test_no_sequence_of_sessions_carries_text_across_salts(sessions: list[tuple[str, list[int]]]) -> None:
    """Each salt writes in tokens of its own after a prompt that all share; only its own are ever proposed to it."""
    method = SuffixMethod(replace(SETTINGS, max_cached_requests=4, min_token_prob=0.0))
    offset = {"": 10, "a": 20, "b": 30}
    for number, (salt, output) in enumerate(sessions):
        session = make_session([0, 1, 2], str(number), salt)
        method.open(session)
        for base_len, token in enumerate(output):
            step = DraftStep(1, base_len, (offset[salt] + token,), 4, max_tree_nodes=32)
            allowed = {0, 1, 2, *range(offset[salt], offset[salt] + 3)}
            assert set(propose(method, session, step).token_ids) <= allowed
        method.close(session)


def test_a_prompt_is_nobody_elses() -> None:
    method = SuffixMethod(SETTINGS)
    writer = make_session([1, 2, 3, 4], "writer")
    method.open(writer)
    assert not method.advance(writer)
    method.close(writer)
    reader = make_session([1, 2], "reader")
    method.open(reader)
    assert propose(method, reader, DraftStep(1, 0, (), 2)).token_ids == ()


def test_what_has_been_evicted_is_not_proposed_any_more() -> None:
    method = SuffixMethod(replace(SETTINGS, max_cached_nodes=2_000))
    sessions = 400
    for number in range(sessions):
        leave_text(method, str(number), [5, 1_000 + number, 1_001 + number, 6, 7, 1_000 + number])
        assert method.past.tree.num_nodes <= 2_000
    found = []
    for number in range(sessions):
        reader = make_session([5, 1_000 + number], f"reader {number}")
        method.open(reader)
        found.append(propose(method, reader, DraftStep(1, 0, (), 1)).token_ids == (1_001 + number,))
        method.close(reader)
    assert not any(found[: sessions // 2])
    assert all(found[-20:])


def test_use_keeps_a_past_output() -> None:
    method = SuffixMethod(replace(SETTINGS, max_cached_requests=2))
    leave_text(method, "used", [1, 2, 3])
    leave_text(method, "unused", [4, 5, 6])

    def read(token: int) -> tuple[int, ...]:
        reader = make_session([token], f"reader {token}")
        method.open(reader)
        found = propose(method, reader, DraftStep(1, 0, (), 1)).token_ids
        method.close(reader)
        return found

    assert read(1) == (2,)
    leave_text(method, "new", [7, 8, 9])
    assert [read(token) for token in (1, 4, 7)] == [(2,), (), (8,)]


def test_a_long_prompt_is_taken_up_in_pieces() -> None:
    method = SuffixMethod(SETTINGS)
    session = make_session([number % 700 for number in range(1_412)])
    method.open(session)
    pieces = 1
    while method.advance(session):
        pieces += 1
    assert pieces == -(-1_412 // CATCH_UP_TOKENS) > 1
    assert propose(method, session, DraftStep(1, 0, (), 3)).token_ids == (12, 13, 14)


def test_a_proposal_costs_the_same_after_a_long_text() -> None:
    """Counted in calls: the same last tokens, seen as often, after a text 50 times as long."""

    def calls(length: int) -> int:
        method = SuffixMethod(SETTINGS)
        middle = [1_000 + number for number in range(length)]
        session = make_session([1, 2, 3, 4, 5, 6, *middle, 1, 2, 3])
        method.open(session)
        while method.advance(session):
            pass
        session.report(DraftStep(1, 0, (), 8))
        count = 0

        def count_calls(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count_calls)
        try:
            (proposal,) = method.propose([session])
        finally:
            sys.setprofile(before)
        assert proposal.token_ids == (4, 5, 6)
        return count

    assert 0 < calls(5_000) <= calls(100)


@pytest.fixture
def engine() -> Iterator[DrafterEngine]:
    """The real engine over the method that the real settings build."""
    methods = build_methods(DrafterConfig(methods=("suffix",)), lambda _line: None)
    running = DrafterEngine(methods, max_num_seqs=4, metrics=DrafterMetrics(CollectorRegistry()))
    running.start()
    yield running
    running.stop()


def test_through_the_engine(engine: DrafterEngine) -> None:
    spec = replace(SPEC, epoch=3, prompt_token_ids=(1, 2, 3, 4, 1, 2))
    client = Client(engine, spec).open()
    assert client.ask(0) == (3, 4)
    assert client.ask(0, (3, 9, 8)) == ()
    assert client.ask(0, (3, 4, 1)) == (2, 3), "reports overwrite by absolute index"
    engine.close(client.handle)
    until(lambda: engine.num_sessions == 0)
    same, other = replace(spec, session_id="t", prompt_token_ids=(7, 3, 4)), replace(spec, cache_salt="x")
    assert Client(engine, same).open().ask(0, count=1) == (1,)
    assert Client(engine, replace(other, prompt_token_ids=(7, 3, 4))).open().ask(0, count=1) == ()
