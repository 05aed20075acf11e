"""One simulation: a fleet, its clients, a seed's faults, and what must hold at the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.gateway.config import GatewayConfig
from outrider.shared.messages import SessionSpec
from outrider.shared.sampling_params import Grammar
from tests.simulation import older_wire
from tests.simulation.client import Client
from tests.simulation.faults import ALL_FAULTS, REDIS_FAULTS, Faults, ProcessFault
from tests.simulation.key_file import OWNER, KeyFile
from tests.simulation.links import Network, Trace
from tests.simulation.loop import Process, SimLoop, StandsStill
from tests.simulation.redis_process.log_rules import LogRules
from tests.simulation.redis_process.node import LOST_S, Journal, RedisNode
from tests.simulation.seams import taken_over
from tests.simulation.services import DrafterNode, GatewayNode, VerifierNode
from tests.simulation.toy import MODEL
from tests.simulation.wishes import SHAPES, Wish

# seconds of virtual time; after the last fault: within it every request is answered (a half-open connection takes 40 s
# to be noticed, an attempt 20, and a few attempts may be needed)
ANSWERED_WITHIN_S = 120.0
# share of clients whose stream another one reads too
RIVAL_SHARE = 0.3
# seconds of virtual time; after the last answer: within it everything is released
RELEASED_WITHIN_S = 60.0
# seconds; within an answer, which takes 0.1 to 2
MOMENT_S = 0.2
# seconds; how long Redis may be away without a request that notices; a commit waits 15, and attempts have their pauses
_SHORT_S = 3.0


@dataclass
class Outcome:
    """One simulation's end. broken: the promises that were not kept. digest: of the trace. seen: how often other things
    happened that are to be covered.
    """

    seed: int
    broken: list[str]
    trace: Trace
    num_steps: int
    virtual_s: float
    num_answered: int
    num_refused: int
    faults: dict[int, tuple[str, str]]
    seen: Counter[str]

    @property
    def digest(self) -> str:
        return f"{self.trace.digest:08x}"


@dataclass
class Seat:
    """A place in the fleet that processes take one after another. start: makes what runs in a process. is_older: the
    next process is of the older version.
    """

    name: str
    start: Callable[[Process], Any]
    is_older: bool = False
    process: Process | None = None
    node: Any = None


class World(logging.Handler):
    """The fleet of one seed. Also the log handler that takes an error of the product for a broken promise."""

    def __init__(
        self,
        loop: SimLoop,
        rng: random.Random,
        faults: Faults,
        shapes: tuple[str, ...],
        folder: Path,
        drafters_differ: bool = True,
    ) -> None:
        """folder: for the file of API keys."""
        super().__init__(logging.ERROR)
        self.loop, self.rng, self.faults, self.shapes = loop, rng, faults, shapes
        self.net = Network(loop, random.Random(rng.getrandbits(64)), faults)
        self.has_lost_data = self.redis_was_away = False
        self._lost_at = -1.0
        self.broken: list[str] = []
        self._grammars: dict[str, Grammar] = {}  # by session's name
        # By name of a log: how far it has ever reached, and when it did.
        self._logged: dict[str, tuple[int, float]] = {}
        self._fsync = rng.choice(list(LOST_S))
        self._journal = Journal()
        num_verifiers, num_drafters, num_gateways = rng.choice([1, 2, 2]), rng.choice([0, 1, 2]), rng.choice([1, 2, 2])
        max_num_seqs, drafts = rng.choice([2, 4, 8]), rng.random() < 0.5
        self._methods = ("draft_model", "ngram") if num_drafters else ("draft_model",) if drafts else ()
        verifiers = tuple(f"10.0.0.{1 + place}:7001" for place in range(num_verifiers))
        drafters = tuple(f"10.0.1.{1 + place}:7002" for place in range(num_drafters))
        self.gateways = [f"gateway-{place}" for place in range(num_gateways)]
        self._keys = KeyFile(folder / "api-keys", self.net) if "new-keys" in faults.enabled else None
        config = GatewayConfig(
            model=MODEL,
            api_keys_file=str(self._keys.path) if self._keys is not None else "",
            verifiers=verifiers,
            drafters=drafters,
            max_queued_commits=rng.choice([1, 4, 64]),
            failover_s=30.0,
            tool_call_parser="hermes",
            draft_timeout_ms=rng.choice([50.0, 500.0]),
        )
        net = self.net
        rules = LogRules(random.Random(rng.getrandbits(64)), self.broken.append)
        self.seats = [Seat("redis", lambda process: RedisNode(net, process, self._journal, self._on_append, rules))]
        self.seats += [
            Seat(f"verifier-{place}", _verifier(net, address, max_num_seqs, drafts, self._on_open))
            for place, address in enumerate(verifiers)
        ]
        self.seats += [
            Seat(f"drafter-{place}", _drafter(net, address, 1 + place if drafters_differ else 0))
            for place, address in enumerate(drafters)
        ]
        self.seats += [Seat(name, lambda process: GatewayNode(net, process, config)) for name in self.gateways]
        if "upgrade" in faults.enabled:
            for seat in self.seats[1:]:
                seat.is_older = rng.random() < 0.5

    # ---- logging.Handler ----

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else ""
        self.broken.append(f"logged: {record.getMessage()} {error!r}")

    # ---- client.Records ----

    def logged_len(self, request_id: str, choice: int) -> int:
        return self._logged.get(self._log_name(request_id, choice), (0, 0.0))[0]

    def may_lack_end(self, request_id: str, choice: int) -> bool:
        return self._logged.get(self._log_name(request_id, choice), (0, 0.0))[1] <= self._lost_at

    def logged(self, request_id: str, choice: int) -> list[tuple[int, int]] | None:
        node: RedisNode = self.seats[0].node
        return node.tokens(self._log_name(request_id, choice))

    def _log_name(self, request_id: str, choice: int) -> str:
        owner = f"{OWNER} " if self._keys is not None else ""
        return f"outrider:{{{owner}{request_id}}}:{choice}:log"

    def api_key(self) -> str:
        return self._keys.current if self._keys is not None else ""

    def grammar_of(self, request_id: str, choice: int) -> Grammar | None:
        return self._grammars.get(f"{request_id}-{choice}")

    def _on_open(self, spec: SessionSpec) -> None:
        """A session moves and is resumed under one grammar."""
        grammar = spec.sampling_params.grammar
        if grammar is not None and self._grammars.setdefault(spec.session_id, grammar) != grammar:
            self.broken.append(f"{spec.session_id} goes on under another grammar: {grammar}")

    def _on_append(self, name: str, end: int) -> None:
        reached, when = self._logged.get(name, (0, -1.0))
        if end > reached or (end == reached and when <= self._lost_at):
            self._logged[name] = end, self.loop.time()

    def num_asked_back(self) -> int:
        """Counts outputs that gave way to other clients' at the gateways that are still there."""
        return sum(node.generation.starts.num_asked_back for node in self._gateway_nodes() if node is not None)

    # ---- processes ----

    def start(self, seat: Seat) -> None:
        process = Process(self.loop, seat.name, is_older=seat.is_older)
        seat.process = process
        seat.node = process.main.context.run(seat.start, process)

    def strike(self, fault: ProcessFault) -> None:
        of_redis = fault.kind in REDIS_FAULTS
        if fault.kind == "no-drafters":
            self._scale_drafters_to_zero(fault)
            return
        if fault.kind == "new-keys":
            if self._keys is not None and self.faults.begins(fault.kind, "gateway"):
                self._keys.replace(self._gateway_nodes)
            return
        others = self.seats[1:] if fault.kind == "upgrade" else self.seats
        seat = self.seats[0] if of_redis else others[fault.victim % len(others)]
        process = seat.process
        if process is None or process.is_dead or process.is_paused:
            return
        if not self.faults.begins(fault.kind, seat.name.partition("-")[0]):
            return
        if of_redis:
            self._strike_redis(fault)
            return
        self.redis_was_away |= seat.name == "redis" and 8 * fault.lasts_s > _SHORT_S
        if fault.kind == "pause":
            self.net.pause(process)
            self.net.later(self.loop.time() + 8 * fault.lasts_s, lambda: self.net.go_on(process))
        elif fault.kind == "clock":
            process.clock_offset_s += 20.0 * (fault.amount - 0.5)
            self.net.trace.add(f"! clock of {seat.name} {process.clock_offset_s:+.3f} s")
        elif fault.kind == "upgrade":
            seat.is_older = not seat.is_older
            self.net.trace.add(f"! {seat.name} becomes {'older' if seat.is_older else 'newer'}")
            self._kill(seat, fault)
        elif seat.name == "redis":
            self._restart_redis(seat, 0.0, fault.lasts_s)
        else:
            self._kill(seat, fault)

    def _kill(self, seat: Seat, fault: ProcessFault) -> None:
        if seat.process is not None and not seat.process.is_dead:
            self.net.kill(seat.process, silently=fault.kind.endswith("power"))
            self.net.later(self.loop.time() + 0.1 + fault.lasts_s, lambda: self.start(seat))

    def _gateway_nodes(self) -> list[GatewayNode | None]:
        """Returns None for one that is down."""
        seats = [seat for seat in self.seats if seat.name in self.gateways]
        return [None if seat.process is None or seat.process.is_dead else seat.node for seat in seats]

    def _scale_drafters_to_zero(self, fault: ProcessFault) -> None:
        drafters = [seat for seat in self.seats if seat.name.startswith("drafter")]
        if drafters and self.faults.begins(fault.kind, "drafter"):
            for seat in drafters:
                self._kill(seat, fault)

    def _strike_redis(self, fault: ProcessFault) -> None:
        seat = self.seats[0]
        node = seat.node
        if fault.kind == "scripts":
            node.execute(("SCRIPT", "FLUSH"))
            self.net.trace.add("! scripts lost")
        elif fault.kind == "redis-full":
            node.is_full = True
            self.redis_was_away |= fault.lasts_s > _SHORT_S
            self.net.trace.add("! redis full")
            self.net.later(self.loop.time() + fault.lasts_s, lambda: setattr(node, "is_full", False))
        else:
            if fault.kind == "rack-power":
                gateways = [other for other in self.seats if other.name in self.gateways]
                self._kill(gateways[fault.victim % len(gateways)], fault)
            self._restart_redis(seat, _lost_s(fault.amount, LOST_S[self._fsync]), fault.lasts_s)

    def _restart_redis(self, seat: Seat, lost_s: float, lasts_s: float) -> None:
        before = len(self._journal.commands)
        self._journal = self._journal.without_last(lost_s, self.loop.time())
        lost = before - len(self._journal.commands)
        if lost:
            self.has_lost_data, self._lost_at = True, self.loop.time()
        self.redis_was_away |= lasts_s > _SHORT_S
        process = seat.process
        assert process is not None
        self.net.kill(process)
        self.net.trace.add(f"! redis loses {lost} of {before} writes")
        self.net.later(self.loop.time() + 0.05 + lasts_s, lambda: self.start(seat))

    def stop_faults(self) -> None:
        """Ends what is still going on: paused processes go on, full ones have room."""
        self.faults.is_over = True
        self.net.trace.add("  all faults are over")
        for seat in self.seats:
            if seat.process is not None and seat.process.is_paused:
                self.net.go_on(seat.process)
        self.seats[0].node.is_full = False

    # ---- one run ----

    async def run(self, num_requests: int) -> list[Client]:
        for seat in self.seats:
            self.start(seat)
        self.faults.arm(self.net, self.strike)
        self.net.later(self.faults.until_s, self.stop_faults)
        clients = [self._client(place) for place in range(num_requests)]
        clients += [self._rival(client) for client in clients if self.rng.random() < RIVAL_SHARE]
        tasks = [client.process.spawn(client.run()) for client in clients]
        while not (all(task.done() for task in tasks) or self.broken):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.1)
        if not self.faults.is_over:
            self.stop_faults()
        released_by = self.loop.time() + RELEASED_WITHIN_S
        while not self.broken and self.leaks() and self.loop.time() < released_by:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        return clients

    def _client(self, place: int) -> Client:
        rng = random.Random(self.rng.getrandbits(64))
        process = Process(self.loop, f"client-{place}")
        return Client(
            self.net,
            process,
            rng,
            Wish.drawn(rng, f"r{place}", self._methods, self.shapes),
            self.gateways,
            self,
            gives_up_at=self.faults.until_s + ANSWERED_WITHIN_S,
            read_pause_s=rng.choice([0.0, 0.0, 0.3]),
            hangs_up_share=rng.choice([0.0, 0.3]),
        )

    def _rival(self, client: Client) -> Client:
        process = Process(self.loop, f"rival-of-{client.process.name}")
        rng = random.Random(self.rng.getrandbits(64))
        return Client(
            self.net, process, rng, client.wish, self.gateways, self, gives_up_at=client.gives_up_at, is_rival=True
        )

    def leaks(self) -> list[str]:
        """What the processes hold although nobody asks for anything; a process that is still down too."""
        left = ["the API key is still being replaced"] if self._keys is not None and self._keys.is_changing else []
        for seat in self.seats:
            if seat.process is None or seat.process.is_dead:
                left.append(f"{seat.name} is down")
            elif hasattr(seat.node, "leaks"):
                left += seat.node.leaks()
        return left

    def check(self, clients: list[Client]) -> list[str]:
        """What is broken at the end."""
        for client in clients:
            client.check_texts()
        broken = [f"{client.process.name}: {text}" for client in clients for text in client.broken]
        for seat in self.seats:
            if seat.process is not None:
                broken += [f"{seat.name}: {text}" for text in seat.process.problems]
        if not self.broken:
            broken += self.leaks()
        return list(dict.fromkeys([*self.broken, *broken, *self.loop.problems]))


def _lost_s(amount: float, most_s: float) -> float:
    """Returns the seconds of writes that a power loss takes, by a draw from 0 to 1. Half of the losses are of a moment
    within an answer: those of more take its beginning too, and then it is over.
    """
    return 2.0 * amount * min(most_s, MOMENT_S) if amount < 0.5 else (2.0 * amount - 1.0) * min(most_s, 1e6)


def _verifier(
    net: Network, address: str, max_num_seqs: int, drafts: bool, on_open: Callable[[SessionSpec], None]
) -> Callable[[Process], Any]:
    return lambda process: VerifierNode(
        net, process, address, max_num_seqs=max_num_seqs, drafts=drafts, on_open=on_open
    )


def _drafter(net: Network, address: str, version: int) -> Callable[[Process], Any]:
    return lambda process: DrafterNode(net, process, address, version)


@contextmanager
def _errors_logged_to(handler: logging.Handler) -> Iterator[None]:
    """The product's errors go to the handler, its warnings nowhere."""
    root = logging.getLogger("outrider")
    before, level, passes_on = root.handlers, root.level, root.propagate
    root.handlers, root.propagate = [handler], False
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.handlers, root.propagate = before, passes_on
        root.setLevel(level)


def simulate(
    seed: int,
    *,
    kinds: tuple[str, ...] = ALL_FAULTS,
    without: frozenset[int] = frozenset(),
    shapes: tuple[str, ...] = SHAPES,
    drafters_differ: bool = True,
) -> Outcome:
    """Runs one seed: all that happens is a function of the arguments. without: the numbers of faults to leave out.
    shapes: of requests (wishes.py). drafters_differ: each guesses wrong at other places.
    """
    rng = random.Random(seed)
    loop = SimLoop(random.Random(rng.getrandbits(64)))
    faults = Faults(random.Random(rng.getrandbits(64)), kinds, without)
    gc.disable()  # or it would close forgotten tasks at any moment
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            taken_over(loop, random.Random(rng.getrandbits(64))),
            older_wire.in_the_log(),
        ):
            world = World(loop, rng, faults, shapes, Path(folder), drafters_differ)
            with _errors_logged_to(world):
                clients: list[Client] = []
                try:
                    clients = loop.run_until_complete(world.run(rng.randint(1, 4)))
                    broken = world.check(clients)
                except StandsStill as error:
                    broken = [*world.broken, f"the simulation stands still: {error}"]
                virtual_s, num_steps = loop.time(), loop.num_steps
                loop.dispose()
    finally:
        loop.close()
        gc.enable()
    return Outcome(
        seed,
        broken,
        world.net.trace,
        num_steps,
        virtual_s,
        sum(client.is_done and not client.is_rival for client in clients),
        sum(bool(client.refused) for client in clients),
        faults.done,
        Counter({"message without newer fields": world.net.num_clipped, "output gave way": world.num_asked_back()})
        + Counter(f"answered {client.wish.shape}" for client in clients if client.is_done and not client.is_rival)
        + Counter({"answered tokens": sum(client.num_tokens for client in clients if not client.is_rival)}),
    )


def shrunk(outcome: Outcome, kinds: tuple[str, ...] = ALL_FAULTS) -> tuple[Outcome, frozenset[int]]:
    """A broken seed with as few of its faults as still break it, and the numbers of those left out."""
    without: frozenset[int] = frozenset()
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for number in sorted(outcome.faults, reverse=True):
            smaller = simulate(outcome.seed, kinds=kinds, without=without | {number})
            if smaller.broken:
                outcome, without, is_smaller = smaller, without | {number}, True
    return outcome, without
