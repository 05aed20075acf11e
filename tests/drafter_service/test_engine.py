"""The drafter's engine: many sessions, one thread, and errors that stay with the session that made them."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from outrider.drafter_service.engine import LONG_REPORT, DrafterEngine
from outrider.drafter_service.metrics import DrafterMetrics
from outrider.drafting.methods.ngram import NgramMethod
from outrider.drafting.session import DraftSession
from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.shared.errors import CommitRefused, InvalidRequest, Overloaded
from outrider.shared.messages import DraftMethodInfo, DraftStep, Proposal, ProposalReply, SessionSpec
from outrider.shared.sampling_params import Grammar, GrammarKind, SamplingParams, SpeculationMode

TARGET = Path(__file__).parents[2] / "models/demo-target"
PROMPT = (1, 2, 3, 1, 2)
SPEC = SessionSpec("s", 3, PROMPT, (), SamplingParams(), SpeculationMode.EXACT, 0, method="ngram")
BOMB = 66


class Pieces(NgramMethod):
    """N-grams with a vocabulary, a catch-up in three pieces, and a token that blows up."""

    def __init__(self) -> None:
        super().__init__(prompt_lookup_min=1, prompt_lookup_max=3)
        self.info = DraftMethodInfo(name="pieces", vocab_size=100)
        self.pieces_left: dict[int, int] = {}
        self.closed: list[str] = []
        self.opened: list[DraftSession] = []

    def open(self, session: DraftSession) -> None:
        super().open(session)
        self.pieces_left[id(session)] = 3
        self.opened.append(session)

    def advance(self, session: DraftSession) -> bool:
        if BOMB in session.token_ids:
            raise ValueError("boom")
        self.pieces_left[id(session)] -= 1
        return self.pieces_left[id(session)] > 0

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        assert all(self.pieces_left[id(session)] <= 0 for session in sessions), "asked before it had caught up"
        return super().propose(sessions)

    def close(self, session: DraftSession) -> None:
        super().close(session)
        self.closed.append(session.spec.session_id)


@dataclass
class Client:
    engine: DrafterEngine
    spec: SessionSpec = SPEC
    replies: queue.Queue[ProposalReply | Exception] = field(default_factory=queue.Queue)
    handle: int = -1

    def open(self) -> Client:
        self.handle = self.engine.open(self.spec, self.replies.put)
        return self

    def ask(self, base_len: int, tokens: tuple[int, ...] = (), count: int = 2, epoch: int = 3) -> tuple[int, ...]:
        self.engine.submit(self.handle, DraftStep(epoch, base_len, tokens, count))
        reply = self.replies.get(timeout=60)
        if isinstance(reply, Exception):
            raise reply
        assert reply.epoch == 3
        assert reply.proposal.base_len == base_len + len(tokens)
        assert reply.timings.total_us >= reply.timings.forward_us >= 0
        return reply.proposal.token_ids


@pytest.fixture
def pieces() -> Pieces:
    return Pieces()


@pytest.fixture
def engine(pieces: Pieces) -> Iterator[DrafterEngine]:
    methods = {"ngram": NgramMethod(prompt_lookup_min=1, prompt_lookup_max=3), "pieces": pieces}
    running = DrafterEngine(methods, max_num_seqs=8, metrics=DrafterMetrics(CollectorRegistry()))
    running.start()
    yield running
    running.stop()


def until(condition: object, *args: object) -> None:
    deadline = time.monotonic() + 60
    while not condition(*args):  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_proposals_follow_the_reported_tokens(engine: DrafterEngine) -> None:
    client = Client(engine).open()
    assert client.ask(0) == (3, 1)
    assert client.ask(0, (3, 1)) == (2, 3)
    assert client.ask(2, (9,)) == ()
    assert client.ask(0, (3,)) == (1, 2), "reports overwrite by absolute index"


def test_a_report_without_a_question_gets_no_answer(engine: DrafterEngine) -> None:
    client = Client(engine).open()
    engine.submit(client.handle, DraftStep(3, 0, (3,), 0))
    assert client.ask(1, (), 1) == (1,)
    assert client.replies.empty()


def test_long_prompts_and_long_reports_are_caught_up_with_first(engine: DrafterEngine, pieces: Pieces) -> None:
    client = Client(engine, replace(SPEC, method="pieces")).open()
    assert client.ask(0) == (3, 1)
    for key in pieces.pieces_left:
        pieces.pieces_left[key] = 2
    report = tuple(range(10, 11 + LONG_REPORT))
    assert client.ask(0, report) == ()
    assert set(pieces.pieces_left.values()) == {0}


def test_grammars_are_compiled_by_who_opens_a_session_not_by_the_engine(engine: DrafterEngine, pieces: Pieces) -> None:
    pieces.grammars = GrammarCompiler(str(TARGET), 4096, [0])
    grammar = Grammar(GrammarKind.REGEX, "a+")
    spec = replace(SPEC, method="pieces", sampling_params=SamplingParams(grammar=grammar))
    compiled = engine.compile_grammar(spec)
    assert compiled is not None
    client = Client(engine, spec)
    client.handle = engine.open(spec, client.replies.put, compiled)
    client.ask(0)
    assert pieces.opened[-1].grammar is compiled
    assert engine.compile_grammar(replace(spec, method="ngram")) is None, "n-grams do not look at it"


def test_many_sessions_from_many_threads(engine: DrafterEngine) -> None:
    def one(number: int) -> list[tuple[int, ...]]:
        method = "pieces" if number % 2 else "ngram"
        client = Client(engine, replace(SPEC, method=method, session_id=str(number))).open()
        found = []
        for _ in range(30):
            found.append(client.ask(0, (3, 1, 2), 3))
        engine.close(client.handle)
        return found

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(one, range(8)):
            assert found == [(3, 1, 2)] * 30
    until(lambda: engine.num_sessions == 0)


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (DraftStep(2, 0, (), 1), CommitRefused),
        (DraftStep(4, 0, (), 1), CommitRefused),
        (DraftStep(3, 1, (), 1), InvalidRequest),
        (DraftStep(3, 0, (-1,), 1), InvalidRequest),
        (DraftStep(3, 0, (100,), 1), InvalidRequest),
        (DraftStep(3, 0, (BOMB,) * (LONG_REPORT + 1), 1), ValueError),
    ],
    ids=["old epoch", "new epoch", "gap", "negative id", "id outside the vocabulary", "a bug"],
)
def test_a_session_that_fails_ends_alone(
    engine: DrafterEngine, pieces: Pieces, step: DraftStep, kind: type[Exception]
) -> None:
    spec = replace(SPEC, method="pieces")
    client, peer = Client(engine, replace(spec, session_id="bad")).open(), Client(engine, spec).open()
    assert peer.ask(0) == (3, 1)
    engine.submit(client.handle, step)
    assert isinstance(client.replies.get(timeout=60), kind)
    assert pieces.closed == ["bad"]
    assert peer.ask(0, (3,)) == (1, 2)
    engine.close(client.handle)  # gone already
    until(lambda: engine.num_sessions == 1)


@pytest.mark.parametrize(
    "change", [{"prompt_token_ids": (100,)}, {"committed_token_ids": (-1,)}, {"method": "psychic"}]
)
def test_opening_with_what_cannot_be_served_is_refused(engine: DrafterEngine, change: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        engine.open(replace(SPEC, **{"method": "pieces", **change}), lambda _reply: None)  # type: ignore[arg-type]
    assert engine.num_sessions == 0


def test_too_many_sessions_are_refused_also_when_they_come_at_once(engine: DrafterEngine) -> None:
    clients, refused = [], 0
    for _ in range(30):
        try:
            clients.append(Client(engine).open())
        except Overloaded:
            refused += 1
    assert (len(clients), refused) == (8, 22)
    engine.close(clients[0].handle)
    until(lambda: engine.num_sessions == 7)
    assert Client(engine).open().ask(0) == (3, 1)


def test_steps_of_a_closed_session_are_dropped(engine: DrafterEngine) -> None:
    client = Client(engine).open()
    engine.close(client.handle)
    engine.submit(client.handle, DraftStep(3, 0, (), 2))
    assert Client(engine).open().ask(0) == (3, 1)
    assert client.replies.empty()
