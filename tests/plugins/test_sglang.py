"""SGLang's algorithm OUTRIDER against the real drafter service. fake_sglang.py has SGLang's side."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.plugins import named, sglang
from outrider.plugins.usable import Draft, usable
from outrider.shared.messages import Proposal
from tests.plugins.fake_runner import cycle
from tests.plugins.fake_sglang import NGRAMWorker, Request, Verifier, parents_of, server_args
from tests.plugins.served_drafter import Method, drafter, until, with_ids
from tests.ports import nobodys_port

TARGET = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))
ONE_RANK = SimpleNamespace(rank_in_group=0, world_size=1)


def requests(count: int, length: int = 120) -> list[Request]:
    texts = [cycle(3 + 2 * number, 5 + number % 5, length + number) for number in range(count)]
    return [Request(f"r{number}", text, 20) for number, text in enumerate(texts)]


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Any:
    def give(*addresses: str, **given: Any) -> None:
        said = {"drafters": list(addresses), "method": "ngram", "deadline_ms": 10_000, **given}
        monkeypatch.setenv("OUTRIDER_OPTIONS", json.dumps(said))

    return give


@contextmanager
def working(wait: bool = True, ranks: Any = ONE_RANK, **given: Any) -> Iterator[Any]:
    worker = sglang.worker_class(NGRAMWorker, lambda: ranks)(server_args(**given), 0, 0, TARGET)
    try:
        links = worker.ngram_corpus._drafts.fleet.links
        if wait:
            until(lambda: all(link.is_up for link in links), "a drafter is not there")
        yield worker
    finally:
        worker.ngram_corpus.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_are_the_service_s_and_the_text_is_the_target_s(options: Any, overlap: bool) -> None:
    opened: list[int] = []

    class Counted(Method):
        def open(self, session: Any) -> None:
            opened.append(len(session.token_ids))
            super().open(session)

    with drafter(Counted()) as served:
        options(served.address)
        with working() as worker:
            verifier, batch = Verifier(worker, overlap), requests(4)
            verifier.finish(batch)
            assert all(list(request.output_ids) == request.text[20:] for request in batch)
            assert verifier.num_steps < 30, "100 tokens each by 4 + 1 a step"
            assert opened == [20] * 4, "one text sent, then only what is new"
            worker.ngram_corpus.erase_match_state([request.rid for request in batch])
            until(lambda: served.engine.num_sessions == 0, "sessions are still open")


def test_trees_are_asked_for_and_verified(options: Any) -> None:
    """A wrong branch beside the right one at each place."""
    asked: list[tuple[int, int]] = []

    class Branching(Method):
        def propose(self, sessions: Any) -> list[Proposal]:
            asked.extend((session.step.max_tree_nodes, session.step.max_branches) for session in sessions)
            return super().propose(sessions)

    def branched(proposal: Proposal) -> Proposal:
        right = proposal.token_ids[:2]
        if len(right) < 2:
            return proposal
        wrong = [(entry + 50) % 100 for entry in right]
        return replace(proposal, token_ids=(right[0], wrong[0], right[1], wrong[1]), parents=(-1, -1, 0, 0))

    method = Branching()
    method.spoil = branched
    with drafter(method) as served:
        options(served.address)
        with working(speculative_eagle_topk=2) as worker:
            verifier, batch = Verifier(worker), requests(2)
            verifier.finish(batch)
            assert all(list(request.output_ids) == request.text[20:] for request in batch)
            assert 100 / 3 <= verifier.num_steps < 50, "two of four tokens are right"
    assert set(asked) == {(4, 2)}


def test_a_tree_s_nodes_and_ancestors() -> None:
    tokens, mask = sglang.tree(9, Draft([1, 2, 3], parents=[-1, -1, 0]), 6)
    assert tokens.tolist() == [9, 1, 2, 3, 3, 3]
    assert parents_of(mask) == [-1, 0, 0, 1, 3, 4], "what is missing goes on below the last node"
    assert mask[3].tolist() == [True, True, False, True, False, False]
    tokens, mask = sglang.tree(9, Draft(), 3)
    assert tokens.tolist() == [9, 9, 9]
    assert np.array_equal(mask, np.tri(3, dtype=bool))


def first_token_law(tokens: Any, mask: Any, probs: list[float]) -> list[float]:
    """The law of the token after the root by SGLang's rule for temperatures (sgl_kernel/speculative/sampling.cuh).

    One coin for all children: each is taken where the probabilities up to it pass the coin, and if none is, a token is
    drawn without them.
    """
    law, left, passed = [0.0] * len(probs), list(probs), 0.0
    for child, parent in enumerate(parents_of(mask)):
        if parent == 0:
            token = int(tokens[child])
            law[token] += min(1.0, passed + probs[token]) - min(1.0, passed)
            passed, left[token] = passed + probs[token], 0.0
    missed = max(0.0, 1.0 - passed)
    return [share + missed * rest / (sum(left) or 1.0) for share, rest in zip(law, left, strict=True)]


@pytest.mark.parametrize("draft", [Draft(), Draft([1, 1, 1, 1], parents=[-1] * 4), Draft([2, 1, 2], parents=[-1] * 3)])
def test_no_draft_moves_the_law(draft: Draft) -> None:
    probs = [0.4, 0.3, 0.2, 0.1]
    taken = usable(draft, num_tokens=5, vocab_size=4, min_confidence=0.0, max_branches=4)
    assert first_token_law(*sglang.tree(3, taken, 6), probs) == pytest.approx(probs)
    filled = np.eye(6, dtype=bool) | (np.arange(6) == 0)
    assert first_token_law([3, 0, 0, 0, 0, 0], filled, probs)[0] == 1.0, "SGLang's own filling says 0 too often"


def _explode(_: Proposal) -> Proposal:
    raise ValueError("boom")


@pytest.mark.parametrize(
    "spoil",
    [
        with_ids(lambda entry: -1 - entry),
        with_ids(lambda entry: 100 + entry),
        with_ids(lambda entry: (entry + 1) % 100),
        lambda proposal: replace(proposal, token_ids=proposal.token_ids * 50),
        lambda proposal: replace(proposal, parents=(-1,) * len(proposal.token_ids)),
        lambda proposal: replace(proposal, token_ids=(4, 4, 4), parents=(-1, -1, -1)),
        _explode,
    ],
    ids=["negative ids", "ids outside", "wrong ids", "too long", "siblings", "one token thrice", "an exception"],
)
def test_a_wrong_or_hostile_drafter_costs_speed_only(options: Any, spoil: Any) -> None:
    method = Method()
    method.spoil = spoil
    with drafter(method) as served:
        options(served.address, deadline_ms=60)
        with working(speculative_eagle_topk=4) as worker:
            batch = requests(3, 60)
            Verifier(worker).finish(batch)
            assert all(list(request.output_ids) == request.text[20:] for request in batch)


def test_a_killed_drafter_s_requests_go_on_at_another_one(options: Any) -> None:
    with drafter() as one, drafter() as other:
        options(one.address, other.address)
        with working() as worker:
            verifier, batch = Verifier(worker), requests(4, 400)
            pending: dict[str, list[int]] = {}
            for _ in range(4):
                verifier.step(batch, pending)
            assert (one.engine.num_sessions, other.engine.num_sessions) == (2, 2)
            one.kill()
            until(lambda: not worker.ngram_corpus._drafts.fleet.links[0].is_up, "the loss is not noticed")
            verifier.step(batch, pending)
            assert other.engine.num_sessions == 4
            other.kill()
            verifier.finish(batch)
            assert all(list(request.output_ids) == request.text[20:] for request in batch)


def test_no_drafter_at_all(options: Any) -> None:
    options(f"127.0.0.1:{nobodys_port()}")
    with working(wait=False) as worker:
        began, batch = time.monotonic(), requests(2, 40)
        Verifier(worker).finish(batch)
        assert time.monotonic() - began < 10
        assert all(list(request.output_ids) == request.text[20:] for request in batch)


def test_sessions_of_an_idle_engine_are_closed(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "_UNSEEN_S", 0.2)
    monkeypatch.setattr(named, "_SWEEP_S", 0.05)
    with drafter() as served:
        options(served.address)
        with working() as worker:
            Verifier(worker).finish(requests(3, 40))
            until(lambda: served.engine.num_sessions == 0, "sessions are still open")


def test_a_name_that_is_given_again_is_another_text(options: Any) -> None:
    with drafter() as served:
        options(served.address)
        with working() as worker:
            for start in (3, 40):
                verifier, request = Verifier(worker), Request("same", cycle(start), 20)
                verifier.finish([request])
                assert list(request.output_ids) == request.text[20:]
                assert verifier.num_steps < 30


def test_ranks_have_the_drafts_of_the_first(options: Any) -> None:
    sent: list[Any] = []

    def first(found: Any, src: int) -> Any:
        sent.append(found)
        return found

    with drafter() as served:
        options(served.address)
        ranks = [SimpleNamespace(rank_in_group=rank, world_size=2) for rank in (0, 1)]
        ranks[0].broadcast_object, ranks[1].broadcast_object = first, lambda found, src: sent[-1]
        with working(ranks=ranks[0]) as worker, working(ranks=ranks[1]) as other:
            assert not other.ngram_corpus._drafts.fleet.links
            request = requests(1)[0]
            for _ in range(3):
                batch = SimpleNamespace(reqs=[request], new_tokens=[[]])
                own = worker._prepare_draft_tokens(batch)
                assert all(map(np.array_equal, own, other._prepare_draft_tokens(batch)))
            assert served.engine.num_sessions == 1
            assert sent[-1][0].token_ids, "there was a draft"


@pytest.mark.parametrize(
    ("said", "given", "expected"),
    [
        ("", {}, "drafters"),
        ("{", {}, "not JSON"),
        ('{"drafters": ["h:1"], "deadlin_ms": 1}', {}, "deadlin_ms"),
        ('{"drafters": ["h:1"]}', {"speculative_num_draft_tokens": 1}, "2 or more"),
        ('{"drafters": ["h:1"]}', {"speculative_eagle_topk": 2, "page_size": 16}, "--page-size 1"),
        ('{"drafters": ["h:1"]}', {"enable_dp_attention": True}, "--enable-dp-attention"),
    ],
)
def test_wrong_options_are_named(monkeypatch: pytest.MonkeyPatch, said: str, given: Any, expected: str) -> None:
    if said:
        monkeypatch.setenv("OUTRIDER_OPTIONS", said)
    else:
        monkeypatch.delenv("OUTRIDER_OPTIONS", raising=False)
    with pytest.raises(ValueError, match=expected):
        sglang.validate(server_args(**given))
