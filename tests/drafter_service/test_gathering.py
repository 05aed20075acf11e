"""Sessions that were drafted for together are waited for, a moment; nobody else is.

The engine and its thread are real, and so are n-grams; a pause stands in for the forward of a draft model.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from prometheus_client import CollectorRegistry

from outrider.drafter_service.engine import DrafterEngine
from outrider.drafter_service.metrics import DrafterMetrics
from outrider.drafting.methods.ngram import NgramMethod
from outrider.drafting.session import DraftSession
from outrider.shared.messages import DraftStep, Proposal, ProposalReply, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode

SPEC = SessionSpec("s", 3, (1, 2, 3, 1, 2), (), SamplingParams(), SpeculationMode.EXACT, 0, method="slow")
PROPOSE_S = 0.02
LONG_S = 60.0


class Slow(NgramMethod):
    """As long as a small model; `gate` holds the next batch until those of a test have asked."""

    def __init__(self) -> None:
        super().__init__(prompt_lookup_min=1, prompt_lookup_max=3)
        self.info = replace(self.info, name="slow")
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[list[str]] = []

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        assert self.gate.wait(LONG_S)
        self.batches.append(sorted(session.spec.session_id for session in sessions))
        time.sleep(PROPOSE_S)
        return super().propose(sessions)


@dataclass
class Client:
    engine: DrafterEngine
    name: str
    replies: queue.Queue[ProposalReply | Exception] = field(default_factory=queue.Queue)
    handle: int = -1

    def open(self) -> Client:
        self.handle = self.engine.open(replace(SPEC, session_id=self.name), self.replies.put)
        return self

    def ask(self) -> None:
        self.engine.submit(self.handle, DraftStep(3, 0, (3,), 2))

    def reply(self) -> ProposalReply:
        reply = self.replies.get(timeout=LONG_S)
        assert isinstance(reply, ProposalReply)
        assert reply.proposal.token_ids == (1, 2)
        return reply


@pytest.fixture
def method() -> Slow:
    return Slow()


@pytest.fixture
def patience(method: Slow) -> list[tuple[int, float]]:
    """Each time the engine was asked how long it waits for more: batches until then, and its answer in seconds."""
    return []


@pytest.fixture
def engine(method: Slow, patience: list[tuple[int, float]]) -> Iterator[DrafterEngine]:
    running = DrafterEngine({"slow": method}, max_num_seqs=8, metrics=DrafterMetrics(CollectorRegistry()))
    ask = running._thread._patience_s

    def noted() -> float:
        patience.append((len(method.batches), seconds := ask()))
        return seconds

    running._thread._patience_s = noted
    running.start()
    yield running
    running.stop()


def longest_wait(patience: list[tuple[int, float]], method: Slow) -> float:
    """Of those before the newest batch."""
    return max(seconds for num_batches, seconds in patience if num_batches == len(method.batches) - 1)


def draft_together(method: Slow, clients: Sequence[Client]) -> None:
    """One batch of all of them: the first holds the engine until the others have asked."""
    method.gate.clear()
    clients[0].ask()
    time.sleep(0.02)
    for client in clients[1:]:
        client.ask()
    method.gate.set()
    for client in clients:
        client.reply()
    while len(method.batches[-1]) != len(clients):
        method.gate.clear()
        for client in clients:
            client.ask()
        time.sleep(0.01)
        method.gate.set()
        for client in clients:
            client.reply()


def ask_in_turn(clients: Sequence[Client], pause_s: float) -> list[ProposalReply]:
    for client in clients:
        client.ask()
        time.sleep(pause_s)
    return [client.reply() for client in clients]


def test_what_is_asked_at_once_is_drafted_at_once(engine: DrafterEngine, method: Slow) -> None:
    clients = [Client(engine, str(number)).open() for number in range(4)]
    draft_together(method, clients)
    assert method.batches[-1] == ["0", "1", "2", "3"]


def test_those_of_the_last_batch_come_together_again(
    engine: DrafterEngine, method: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asks that lie less apart than the engine's patience: 2 ms are less than a busy machine makes of any pause."""
    clients = [Client(engine, str(number)).open() for number in range(3)]
    draft_together(method, clients)
    monkeypatch.setattr("outrider.drafter_service.engine._PATIENCE_SHARE", LONG_S / PROPOSE_S)
    monkeypatch.setattr("outrider.drafter_service.engine._LONGEST_PATIENCE_S", LONG_S)
    for _ in range(10):
        replies = ask_in_turn(clients, 0.0003)
        assert {reply.timings.batch_sessions for reply in replies} == {3}


def test_one_alone_waits_for_nobody(engine: DrafterEngine, patience: list[tuple[int, float]]) -> None:
    client = Client(engine, "0").open()
    for _ in range(15):
        client.ask()
        client.reply()
    assert {seconds for _, seconds in patience} == {0.0}


def test_one_that_does_not_come_back_is_waited_for_once_and_briefly(
    engine: DrafterEngine, method: Slow, patience: list[tuple[int, float]]
) -> None:
    here, away = Client(engine, "0").open(), Client(engine, "1").open()
    waited: list[float] = []
    for _ in range(9):
        draft_together(method, [here, away])
        here.ask()
        assert here.reply().timings.queue_us >= 1800
        waited.append(longest_wait(patience, method))
        here.ask()
        here.reply()
        assert longest_wait(patience, method) == 0.0
    # 2 ms are the engine's longest patience; less is left when it is asked, nothing if it could not run meanwhile.
    assert max(waited) > 0.0
    assert max(waited) <= 0.002


def test_one_that_has_left_is_not_waited_for(
    engine: DrafterEngine, method: Slow, patience: list[tuple[int, float]]
) -> None:
    here = Client(engine, "0").open()
    for number in range(9):
        away = Client(engine, f"away {number}").open()
        draft_together(method, [here, away])
        engine.close(away.handle)
        here.ask()
        here.reply()
        assert longest_wait(patience, method) == 0.0


def test_all_that_are_awaited_have_come_and_it_begins(
    engine: DrafterEngine, method: Slow, patience: list[tuple[int, float]]
) -> None:
    clients = [Client(engine, str(number)).open() for number in range(2)]
    num_together = 0
    deadline = time.monotonic() + LONG_S
    while num_together < 5:
        assert time.monotonic() < deadline
        draft_together(method, clients)
        num_before = len(method.batches)
        ask_in_turn(clients, 0.0)
        if len(method.batches) == num_before + 1:  # the second came within the patience for it
            assert [seconds for num_batches, seconds in patience if num_batches == num_before][-1] == 0.0
            num_together += 1
