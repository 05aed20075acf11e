"""A fleet under load in simulated time: arrivals, placement, and what comes out."""

from __future__ import annotations

import enum
import random
import time
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from benchmarks.records import quantiles
from benchmarks.simulation.costs import Costs
from benchmarks.simulation.drafter import SimulatedDrafter
from benchmarks.simulation.events import Events, Machine, OwnMachine, SharedMachine
from benchmarks.simulation.session import Link, Request, Session, Tally
from benchmarks.simulation.verifier import SimulatedVerifier
from benchmarks.simulation.verifier_auto import DrafterLengths
from outrider.gateway.fleet.placement import LOAD_FACTOR, LOAD_MARGIN
from outrider.shared.errors import ConfigError

MemberT = TypeVar("MemberT")
# Coefficient of variation of the times between bursty arrivals (gamma distributed); Poisson has 1.
BURSTINESS = 3.0


class Arrivals(enum.StrEnum):
    """STREAMS: a fixed number at a time, the next request when one has ended; else open loop at a rate."""

    POISSON = "poisson"
    BURSTY = "bursty"
    STREAMS = "streams"


@dataclass(frozen=True)
class Scenario:
    """`load` is requests a second per verifier, or streams per verifier. method: off, auto or fixed:N."""

    num_verifiers: int
    num_drafters: int
    method: str
    load: float
    arrivals: Arrivals = Arrivals.POISSON
    link: Link = field(default_factory=Link)
    domain: str = "code"
    # Mean of an exponential distribution in open loop; every request's in STREAMS.
    num_tokens: int = 96
    max_draft_tokens: int = 8
    # Measured, after those in which the fleet fills and the policy learns.
    seconds: float = 60.0
    warm_up_s: float = 5.0
    seed: int = 0
    # All services on one machine, whose cores they share; else each has its own.
    one_machine: bool = False
    cached_prompts: bool = False

    def __post_init__(self) -> None:
        if self.num_verifiers < 1 or self.num_drafters < 0 or self.load <= 0 or self.seconds <= 0:
            raise ConfigError("a fleet needs at least one verifier, and load and seconds above 0")
        if self.method not in ("off", "auto") and not self.fixed_length:
            raise ConfigError(f"method {self.method!r}: must be off, auto or fixed:N with N from 1 to 16")

    @property
    def fixed_length(self) -> int:
        """0: the length is not fixed."""
        name, _, length = self.method.partition(":")
        return int(length) if name == "fixed" and length.isdigit() and 1 <= int(length) <= 16 else 0


@dataclass(frozen=True)
class Outcome:
    """Seconds are simulated, but `cpu_s`: those of this process. Quantiles as benchmarks/records.py makes them."""

    tokens_per_s: float
    first_token_s: dict[str, float]
    token_s: dict[str, float]
    tokens_per_round: float
    drafted_share: float
    draft_length: float
    verifier_busy: float
    drafter_busy: float
    num_timeouts: int
    num_requests: int
    num_events: int
    cpu_s: float


class LeastLoaded(Generic[MemberT]):
    """Members by the number of their sessions; the first of the least loaded is found at once, however many."""

    def __init__(self, members: list[MemberT]) -> None:
        self._loads = dict.fromkeys(members, 0)
        self._at_load: list[dict[MemberT, None]] = [dict.fromkeys(members)]

    def load(self, member: MemberT) -> int:
        return self._loads[member]

    def least(self) -> MemberT:
        return next(iter(next(members for members in self._at_load if members)))

    def add(self, member: MemberT, difference: int) -> None:
        load = self._loads[member]
        del self._at_load[load][member]
        self._loads[member] = load = load + difference
        while len(self._at_load) <= load:
            self._at_load.append({})
        self._at_load[load][member] = None


class Fleet:
    def __init__(self, scenario: Scenario, costs: Costs) -> None:
        if scenario.domain not in costs.domains:
            raise ConfigError(f"domain {scenario.domain!r}: recorded are {', '.join(costs.domains)}")
        self._scenario = scenario
        self._costs = costs
        self._domain = costs.domains[scenario.domain]
        if max(scenario.max_draft_tokens, scenario.fixed_length) > self._domain.num_draft_tokens:
            raise ConfigError(f"acceptance was recorded for up to {self._domain.num_draft_tokens} draft tokens")
        self._events = Events()
        self._rng = random.Random(scenario.seed)
        # Of its own, so that every method is sent the same requests at the same times.
        self._request_rng = random.Random(scenario.seed + 1)
        shared = SharedMachine(self._events)
        self._members = [
            SimulatedVerifier(self._events, self._machine(shared), costs, one_machine=scenario.one_machine)
            for _ in range(scenario.num_verifiers)
        ]
        self._drafter_members = [
            SimulatedDrafter(self._events, self._machine(shared), costs, one_machine=scenario.one_machine)
            for _ in range(scenario.num_drafters)
        ]
        self._verifiers, self._drafters = LeastLoaded(self._members), LeastLoaded(self._drafter_members)
        self._length = None if scenario.method == "auto" else scenario.fixed_length
        if self._length is None:
            for verifier in self._members:
                verifier.own_drafts = DrafterLengths(verifier.step_costs, scenario.max_draft_tokens)
        self._num_requests = 0
        self.tally = Tally()

    def run(self) -> Outcome:
        """The fleet from empty, once."""
        started = time.process_time()
        scenario = self._scenario
        if scenario.arrivals is Arrivals.STREAMS:
            for _ in range(round(scenario.load * scenario.num_verifiers)):
                self._begin()
        else:
            self._arrive()
        self._events.run(until_s=scenario.warm_up_s)
        self.tally.reset()
        services: list[SimulatedVerifier | SimulatedDrafter] = [*self._members, *self._drafter_members]
        for service in services:
            service.busy_s = 0.0
        self._events.run(until_s=scenario.warm_up_s + scenario.seconds)
        return self._outcome(time.process_time() - started)

    def _outcome(self, cpu_s: float) -> Outcome:
        scenario, tally = self._scenario, self.tally
        return Outcome(
            tokens_per_s=tally.num_tokens / scenario.seconds,
            first_token_s=quantiles(tally.first_token_s),
            token_s=quantiles(tally.token_s),
            tokens_per_round=tally.num_tokens / max(1, tally.num_rounds),
            drafted_share=tally.num_drafted_rounds / max(1, tally.num_rounds),
            draft_length=tally.num_draft_tokens / max(1, tally.num_drafted_rounds),
            verifier_busy=_mean([verifier.busy_s for verifier in self._members]) / scenario.seconds,
            drafter_busy=_mean([drafter.busy_s for drafter in self._drafter_members]) / scenario.seconds,
            num_timeouts=tally.num_timeouts,
            num_requests=self._num_requests,
            num_events=self._events.num_done,
            cpu_s=cpu_s,
        )

    def _machine(self, shared: SharedMachine) -> Machine:
        return shared if self._scenario.one_machine else OwnMachine(self._events)

    def _arrive(self) -> None:
        self._events.after(self._until_next_s(), self._next)

    def _next(self) -> None:
        self._begin()
        self._arrive()

    def _until_next_s(self) -> float:
        rate = self._scenario.load * self._scenario.num_verifiers
        if self._scenario.arrivals is Arrivals.POISSON:
            return self._request_rng.expovariate(rate)
        shape = BURSTINESS**-2
        return self._request_rng.gammavariate(shape, 1.0 / (rate * shape))

    def _begin(self) -> None:
        scenario = self._scenario
        verifier = self._place()
        self._verifiers.add(verifier, 1)
        request = self._request()
        self._num_requests += 1

        def end() -> None:
            self._verifiers.add(verifier, -1)
            if scenario.arrivals is Arrivals.STREAMS:
                self._begin()

        Session(
            self._events, self._costs, scenario.link, self._rng, request, self._length, verifier,
            self._acquire, lambda drafter: self._drafters.add(drafter, -1), end, self.tally,
        ).start()  # fmt: skip

    def _place(self) -> SimulatedVerifier:
        """gateway/fleet/placement.py with prompts of which no two begin alike."""
        affine, least = self._rng.choice(self._members), self._verifiers.least()
        limit = LOAD_FACTOR * self._verifiers.load(least) + LOAD_MARGIN
        return affine if self._verifiers.load(affine) <= limit else least

    def _request(self) -> Request:
        scenario, domain = self._scenario, self._domain
        place = self._request_rng.randrange(len(domain.accepted))
        num_tokens = scenario.num_tokens
        if scenario.arrivals is not Arrivals.STREAMS:
            num_tokens = max(2, round(self._request_rng.expovariate(1.0 / num_tokens)))
        num_rows = self._costs.cached_prompt_rows if scenario.cached_prompts else domain.num_prompt_tokens[place]
        return Request(num_tokens, num_rows, domain.accepted[place])

    def _acquire(self) -> SimulatedDrafter | None:
        if not self._drafter_members:
            return None
        drafter = self._drafters.least()
        self._drafters.add(drafter, 1)
        return drafter


def simulate(scenario: Scenario, costs: Costs) -> Outcome:
    """Raises ConfigError where the scenario asks for what was not recorded. One at a time in a process."""
    return Fleet(scenario, costs).run()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
