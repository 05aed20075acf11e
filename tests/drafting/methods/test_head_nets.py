"""What heads propose through paged caches, batches and trees is what the same head says on whole sequences.

The oracle runs a head with transformers' eager attention over the whole path, with no cache; whether the head itself
follows its paper is tested beside it (tests/drafting/heads).
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from outrider.drafting.growth.draft import MAX_BRANCHES, ROOT
from outrider.drafting.paged.feature_rows import CATCH_UP_ROWS
from outrider.drafting.session import DraftSession
from outrider.shared.messages import DraftStep, Proposal, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from tests.drafting.head_cases import KINDS, ONE_PASS_HEADS, RECURRENT, VOCAB_SIZE, Case, Target, prompt_of

GREEDY = SamplingParams(temperature=0.0)


def check(case: Case, session: DraftSession, target: Target, proposal: Proposal, first: int = 0) -> None:
    """Each node stands where the oracle's ranking of its place says (greedy)."""
    tokens = session.token_ids
    features = target.features(first, len(tokens) - 1)
    parents = proposal.parents or tuple(range(-1, len(proposal.token_ids) - 1))
    assert proposal.token_ids
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    for place, nodes in children.items():
        path: list[int] = []
        at = place
        while at != ROOT:
            path.insert(0, proposal.token_ids[at])
            at = parents[at]
        ranking = np.argsort(-case.logits(tokens[first:], features, path), kind="stable")
        assert [proposal.token_ids[node] for node in nodes] == ranking[: len(nodes)].tolist(), (place, path)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_sessions_in_one_batch_propose_what_the_head_says(kind: str, tree: bool) -> None:
    case = Case(kind)
    lengths = (7, 3, CATCH_UP_ROWS + 40)
    sessions = [
        case.open(prompt_of(seed, length), GREEDY, SpeculationMode.EXACT) for seed, length in enumerate(lengths)
    ]
    targets = [Target(case, length, seed) for seed, length in enumerate(lengths)]
    rng = random.Random(3)
    for _round in range(4):
        for session, target in zip(sessions, targets, strict=True):
            first = -session.prompt_len if session.committed_len == 0 else session.committed_len - 1
            committed = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 4))]
            case.report(session, target, committed, first, 4)
            if tree and session.step is not None:
                session.step = DraftStep(1, 0, (), 4, max_tree_nodes=10)
        proposals = case.method.propose(sessions)
        for session, target, proposal in zip(sessions, targets, proposals, strict=True):
            assert bool(proposal.parents) == tree
            check(case, session, target, proposal)


@pytest.mark.parametrize("kind", KINDS)
def test_asked_twice_without_a_commit_it_says_the_same(kind: str) -> None:
    case = Case(kind)
    session = case.open(prompt_of(1, 9), GREEDY, SpeculationMode.EXACT)
    target = Target(case, 9, 1)
    case.report(session, target, [5], -9, 3)
    first = case.method.propose([session])
    assert case.method.propose([session]) == first
    check(case, session, target, first[0])


@pytest.mark.parametrize("kind", KINDS)
def test_without_its_hidden_states_it_asks_for_them(kind: str) -> None:
    case = Case(kind)
    session = case.open(prompt_of(1, 9), GREEDY, SpeculationMode.EXACT)
    session.report(DraftStep(1, 0, (4, 4), 3))
    assert case.method.propose([session])[0].token_ids == ()
    assert session.missing_hidden_from == (-9 if kind in RECURRENT else 0)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_prefix_whose_states_are_gone_is_left_out(kind: str) -> None:
    case = Case(kind)
    session = case.open(prompt_of(2, 20), GREEDY, SpeculationMode.EXACT)
    target = Target(case, 20, 2)
    case.report(session, target, [5, 6], -12, 4)
    proposal = case.method.propose([session])[0]
    check(case, session, target, proposal, first=8)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_session_whose_rows_were_taken_goes_on_with_what_comes(kind: str) -> None:
    """One cache for one session: the second takes the first one's rows, both go on proposing."""
    # An assistant's keys are of heads of 16 and of 32.
    bytes_per_block = 4 * 2 * 16 * 4 * (2 if "two" in kind else 3 if kind == "assistant" else 1)
    case = Case(kind, kv_cache_bytes=8 * bytes_per_block)
    sessions = [case.open(prompt_of(seed, 20), GREEDY, SpeculationMode.EXACT) for seed in range(2)]
    targets = [Target(case, 20, seed) for seed in range(2)]
    for session, target in zip(sessions, targets, strict=True):
        case.report(session, target, [5], -20, 4)
        check(case, session, target, case.method.propose([session])[0])
        case.paged.blocks.check_integrity()
    case.report(sessions[0], targets[0], [7], 0, 4)
    proposal = case.method.propose([sessions[0]])[0]
    check(case, sessions[0], targets[0], proposal, first=20)
    for session in sessions:
        case.method.close(session)
    assert case.paged.blocks.num_free_blocks == case.paged.blocks.num_blocks


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_taken_back_are_forgotten(kind: str) -> None:
    case = Case(kind)
    session = case.open(prompt_of(4, 12), GREEDY, SpeculationMode.EXACT)
    target = Target(case, 12, 4)
    case.report(session, target, [1, 2, 3, 4], -12, 4)
    case.method.propose([session])
    session.report(DraftStep(1, 1, (9, 9, 9), 4, hidden_states=(target.rows(0, 3),)))
    proposal = case.method.propose([session])[0]
    check(case, session, target, proposal)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [SpeculationMode.EXACT, SpeculationMode.REJECTION])
def test_sampling_modes_propose(kind: str, mode: SpeculationMode) -> None:
    case = Case(kind)
    params = SamplingParams(temperature=0.8, seed=2 if mode is SpeculationMode.EXACT else None, top_k=8)
    session = case.open(prompt_of(5, 12), params, mode)
    case.report(session, Target(case, 12, 5), [1, 2], -12, 4)
    session.step = DraftStep(1, 0, (), 4, max_tree_nodes=9)
    proposal = case.method.propose([session])[0]
    assert 4 <= len(proposal.token_ids) <= 9
    assert bool(proposal.laws) == (mode is SpeculationMode.REJECTION)


def opened(case: Case, prompt: list[int], cache_salt: str = "") -> DraftSession:
    spec = SessionSpec("s", 1, tuple(prompt), (), GREEDY, SpeculationMode.EXACT, stream_key=9, cache_salt=cache_salt)
    session = DraftSession(spec, list(prompt), lambda _reply: None)
    case.method.open(session)
    return session


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kind", RECURRENT)
def test_a_prompt_read_once_is_not_read_again(kind: str, tree: bool) -> None:
    """The second session is given no row of what the first has read, and says what the whole prompt makes of it."""
    case = Case(kind)
    prompt = prompt_of(6, CATCH_UP_ROWS + 20)
    target = Target(case, len(prompt), 6)
    first = case.open(prompt, GREEDY, SpeculationMode.EXACT)
    case.report(first, target, [1, 2], -len(prompt), 4)
    case.method.propose([first])
    for committed in ([1, 2], [7]):
        second = case.open(prompt, GREEDY, SpeculationMode.EXACT)
        assert second.hidden.end > len(prompt) - 8  # blocks of 4, and the last row is computed again
        case.report(second, target, committed, second.hidden.end - len(prompt), 4)
        if tree and second.step is not None:
            second.step = DraftStep(1, 0, (), 4, max_tree_nodes=10)
        check(case, second, target, case.method.propose([second])[0])
        case.method.close(second)
    case.report(first, target, [3], 1, 4)
    check(case, first, target, case.method.propose([first])[0])
    case.method.close(first)
    case.paged.blocks.check_integrity()
    assert case.paged.blocks.num_free_blocks == case.paged.blocks.num_blocks


def test_the_next_turn_of_a_chat_begins_with_the_output_of_the_last() -> None:
    case = Case("eagle3")
    prompt, output = prompt_of(7, 9), prompt_of(8, 12)
    target = Target(case, len(prompt), 7)
    first = opened(case, prompt)
    case.report(first, target, output, -len(prompt), 4)
    case.method.propose([first])
    case.method.close(first)
    chat = prompt + output + prompt_of(9, 5)
    second = opened(case, chat)
    assert second.hidden.end == 20, "row 19 goes with token 20, the last one"
    target.prompt_len = len(chat)
    case.report(second, target, [3], second.hidden.end - len(chat), 4)
    check(case, second, target, case.method.propose([second])[0])


def test_rows_are_shared_only_where_they_are_the_same() -> None:
    case = Case("eagle3")
    prompt = prompt_of(10, 20)
    target = Target(case, len(prompt), 10)
    short = opened(case, prompt)
    case.report(short, target, [5, 6], -12, 4)  # its first 8 rows never came
    case.method.propose([short])
    case.method.close(short)
    assert opened(case, prompt).hidden.end == 0
    whole = opened(case, prompt)
    case.report(whole, target, [5, 6], -20, 4)
    case.method.propose([whole])
    case.method.close(whole)
    assert opened(case, prompt).hidden.end == 16
    assert opened(case, [prompt[0] ^ 1, *prompt[1:]]).hidden.end == 0, "row 0 follows from the first token too"
    assert opened(case, [*prompt[:10], prompt[10] ^ 1, *prompt[11:]]).hidden.end == 8
    assert opened(case, prompt, "another tenant").hidden.end == 0


@pytest.mark.parametrize("kind", ONE_PASS_HEADS)
def test_a_tree_of_one_pass_is_the_best_there_is(kind: str) -> None:
    """Oracle: every path of up to three tokens, of the four likeliest at each place, by its probability."""
    case = Case(kind)
    session = case.open(prompt_of(3, 11), GREEDY, SpeculationMode.EXACT)
    target = Target(case, 11, 3)
    case.report(session, target, [5], -11, 3)
    session.step = DraftStep(1, 0, (), 3, max_tree_nodes=12)
    [proposal] = case.method.propose([session])
    features = target.features(0, len(session.token_ids) - 1)
    joints: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        found: dict[tuple[int, ...], float] = {}
        for path, joint in frontier.items():
            logits = case.logits(session.token_ids, features, path)
            probs = np.exp(logits - logits.max())
            for token in np.argsort(-logits)[:MAX_BRANCHES]:
                found[(*path, int(token))] = joint * float(probs[token] / probs.sum())
        joints |= found
        frontier = found
    best = sorted(joints, key=lambda path: -joints[path])[:12]
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.token_ids, proposal.parents, strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
    assert set(paths) == set(best)
