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

from drafter_service.engine import DrafterEngine
from drafter_service.methods.ngram import NgramMethod
from drafter_service.metrics import DrafterMetrics
from drafter_service.session import DraftSession
from shared.messages import DraftStep, Proposal, ProposalReply, SessionSpec
from shared.sampling_params import SamplingParams, SpeculationMode

SPEC = SessionSpec("s", 3, (1, 2, 3, 1, 2), (), SamplingParams(), SpeculationMode.EXACT, 0, method="slow")
PROPOSE_S = 0.02


class Slow(NgramMethod):
    """As long as a small model; `gate` holds the next batch until those of a test have asked."""

    def __init__(self) -> None:
        super().__init__(prompt_lookup_min=1, prompt_lookup_max=3)
        self.info = replace(self.info, name="slow")
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[list[str]] = []

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        assert self.gate.wait(20)
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
        reply = self.replies.get(timeout=20)
        assert isinstance(reply, ProposalReply)
        assert reply.proposal.token_ids == (1, 2)
        return reply


@pytest.fixture
def method() -> Slow:
    return Slow()


@pytest.fixture
def engine(method: Slow) -> Iterator[DrafterEngine]:
    running = DrafterEngine({"slow": method}, max_num_seqs=8, metrics=DrafterMetrics(CollectorRegistry()))
    running.start()
    yield running
    running.stop()


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


def test_those_of_the_last_batch_come_together_again(engine: DrafterEngine, method: Slow) -> None:
    """Asks that lie less apart than the engine's patience; a busy machine may stretch a pause, so most must do."""
    clients = [Client(engine, str(number)).open() for number in range(3)]
    num_together = 0
    for _ in range(10):
        draft_together(method, clients)
        replies = ask_in_turn(clients, 0.0003)
        num_together += {reply.timings.batch_sessions for reply in replies} == {3}
    assert num_together >= 5


def test_one_alone_waits_for_nobody(engine: DrafterEngine) -> None:
    client = Client(engine, "0").open()
    queues = []
    for _ in range(15):
        client.ask()
        queues.append(client.reply().timings.queue_us)
    assert sorted(queues)[len(queues) // 2] < 1000


def test_one_that_does_not_come_back_is_waited_for_once_and_briefly(engine: DrafterEngine, method: Slow) -> None:
    here, away = Client(engine, "0").open(), Client(engine, "1").open()
    first: list[int] = []
    later: list[int] = []
    for _ in range(9):
        draft_together(method, [here, away])
        for waits in (first, later):
            here.ask()
            waits.append(here.reply().timings.queue_us)
    # 2 ms, the engine's longest patience, and then not at all.
    assert 1800 <= sorted(first)[4] < 20_000
    assert sorted(later)[4] < 1000


def test_one_that_has_left_is_not_waited_for(engine: DrafterEngine, method: Slow) -> None:
    here = Client(engine, "0").open()
    waits = []
    for number in range(9):
        away = Client(engine, f"away {number}").open()
        draft_together(method, [here, away])
        engine.close(away.handle)
        here.ask()
        waits.append(here.reply().timings.queue_us)
    assert sorted(waits)[4] < 1000


def test_all_that_are_awaited_have_come_and_it_begins(engine: DrafterEngine, method: Slow) -> None:
    clients = [Client(engine, str(number)).open() for number in range(2)]
    waits = []
    for _ in range(9):
        draft_together(method, clients)
        waits.append(max(reply.timings.queue_us for reply in ask_in_turn(clients, 0.0)))
    assert sorted(waits)[4] < 1800
