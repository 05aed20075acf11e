"""One gateway and its verifiers in simulated time, made for comparing draft lengths: every variant meets the same
requests (texts, lengths, arrivals), and each verifier is scored alone.

Verifiers draft by themselves, or, with a `link`, ask one drafter of their own over it. Not simulated: placement (each
verifier has its own requests), services that share a machine's cores, KV memory.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulation.costs import Costs
from benchmarks.simulation.drafter import SimulatedDrafter
from benchmarks.simulation.events import Events, OwnMachine
from benchmarks.simulation.local_drafts import Count, DraftPrices, LocalDrafting, LocalSession
from benchmarks.simulation.rounds import DraftLengths, FixedLengths
from benchmarks.simulation.session import Link, Request, Session, Tally
from benchmarks.simulation.verifier import SimulatedVerifier
from benchmarks.simulation.verifier_auto import DRAFT_METHOD, DrafterLengths, VerifierLengths
from benchmarks.simulation.worlds.text import NUM_TOKENS, Acceptance, Text

# share; a request is shorter or longer than the mean by at most this, so that streams do not end together
_LENGTH_SPREAD = 0.25


@dataclass(frozen=True)
class Method:
    """A draft method beside DRAFT_METHOD; all requests are alike to it."""

    name: str
    prices: DraftPrices
    acceptance: Acceptance


@dataclass(frozen=True)
class Server:
    """A verifier, its method, and its load: streams, or with `is_rate` requests a second (Poisson).

    kinds: of its requests; empty: the world's. others: methods of which `auto` alone may choose too. num_joining:
    streams that come when the measured time begins.
    """

    costs: Costs
    prices: DraftPrices
    load: float
    is_rate: bool = False
    kinds: tuple[Acceptance, ...] = ()
    others: tuple[Method, ...] = ()
    num_joining: int = 0


@dataclass(frozen=True)
class World:
    """Requests are of one of `kinds` by chance; `later`: what these become after changes_at of the measured time."""

    servers: tuple[Server, ...]
    kinds: tuple[Acceptance, ...]
    num_tokens: int
    num_prompt_rows: int
    warm_up_s: float
    seconds: float
    later: tuple[Acceptance, ...] = ()
    changes_at: float = 0.5
    link: Link | None = None
    max_draft_tokens: int = 5
    seed: int = 0


@dataclass(frozen=True)
class Served:
    """Service of a verifier. token_rate: tokens a second of one session; with streams, of all over their number."""

    token_rate: float
    tokens_per_s: float
    tokens_per_round: float
    drafted_share: float
    draft_length: float


def run_world(world: World, length: int | None) -> list[Served]:
    """Returns what each server served. length: draft tokens of every round, 0: none; None: `auto`."""
    return _Run(world, length).run()


def _texts(world: World, server: Server) -> tuple[Text, ...]:
    changes_at_s = world.warm_up_s + world.changes_at * world.seconds
    kinds = server.kinds or world.kinds
    later = kinds if server.kinds else world.later or kinds
    return tuple(
        _text(kind, 1000 * world.seed + place, becomes, changes_at_s)
        for place, (kind, becomes) in enumerate(zip(kinds, later, strict=True))
    )


@functools.lru_cache(maxsize=8)
def _text(kind: Acceptance, seed: int, later: Acceptance, changes_at_s: float) -> Text:
    """Returns the same text for every variant: a text takes longer to draw than a short run."""
    return Text(kind, seed, later, changes_at_s)


def _prices(server: Server) -> dict[str, DraftPrices]:
    return {DRAFT_METHOD: server.prices, **{method.name: method.prices for method in server.others}}


class _Run:
    def __init__(self, world: World, length: int | None) -> None:
        self._world = world
        self.events = Events()
        verifiers = [SimulatedVerifier(self.events, OwnMachine(self.events), s.costs) for s in world.servers]
        lengths: list[DraftLengths] = [FixedLengths(DRAFT_METHOD, length or 0) for _ in verifiers]
        if length is None:
            lengths = self._auto(verifiers)
        self.length = length
        self._hosts = [
            _Host(self, world, place, verifier, LocalDrafting(_prices(server), lengths[place]))
            for place, (verifier, server) in enumerate(zip(verifiers, world.servers, strict=True))
        ]

    def _auto(self, verifiers: Sequence[SimulatedVerifier]) -> list[DraftLengths]:
        world = self._world
        limits = [dict.fromkeys(_prices(server), world.max_draft_tokens) for server in world.servers]
        return [
            VerifierLengths(verifier.step_costs, served) for verifier, served in zip(verifiers, limits, strict=True)
        ]

    def run(self) -> list[Served]:
        world = self._world
        for host in self._hosts:
            host.begin()
        self.events.run(until_s=world.warm_up_s)
        for host in self._hosts:
            host.count.reset(world.warm_up_s)
            host.tally.reset()
            host.join()
        end_s = world.warm_up_s + world.seconds
        self.events.run(until_s=end_s)
        return [host.served(end_s) for host in self._hosts]


class _Host:
    """A verifier with the requests that come to it."""

    def __init__(
        self, run: _Run, world: World, place: int, verifier: SimulatedVerifier, drafting: LocalDrafting
    ) -> None:
        self._run = run
        self._world = world
        self._server = world.servers[place]
        self._verifier = verifier
        self._drafting = drafting
        self._texts = _texts(world, world.servers[place])
        self._other_texts = {
            method.name: _text(method.acceptance, 1000 * world.seed + 500 + index, method.acceptance, math.inf)
            for index, method in enumerate(world.servers[place].others)
        }
        self._events = run.events
        self._arrival_rng = random.Random(f"arrivals {world.seed} {place}")
        self._request_rng = random.Random(f"requests {world.seed} {place}")
        self._link_rng = random.Random(f"link {world.seed} {place}")
        self.count, self.tally = Count(), Tally()
        self._drafter: SimulatedDrafter | None = None
        if world.link is None:
            verifier.own_drafts = drafting
        else:
            if run.length is None:
                verifier.own_drafts = DrafterLengths(verifier.step_costs, world.max_draft_tokens)
            self._drafter = SimulatedDrafter(run.events, OwnMachine(run.events), self._server.costs)

    def begin(self) -> None:
        if self._server.is_rate:
            self._arrive()
        else:
            for _ in range(round(self._server.load)):
                self._request()

    def join(self) -> None:
        for _ in range(self._server.num_joining):
            self._request()

    def served(self, end_s: float) -> Served:
        count, tally, seconds = self.count, self.tally, self._world.seconds
        count.change(0, end_s)
        if self._drafter is not None:
            count.num_tokens, count.num_rounds = tally.num_tokens, tally.num_rounds
            count.num_drafted_rounds, count.num_draft_tokens = tally.num_drafted_rounds, tally.num_draft_tokens
        return Served(
            token_rate=count.num_tokens / count.session_s if count.session_s else 0.0,
            tokens_per_s=count.num_tokens / seconds,
            tokens_per_round=count.num_tokens / max(1, count.num_rounds),
            drafted_share=count.num_drafted_rounds / max(1, count.num_rounds),
            draft_length=count.num_draft_tokens / max(1, count.num_drafted_rounds),
        )

    def _arrive(self) -> None:
        self._events.after(self._arrival_rng.expovariate(self._server.load), self._arrived)

    def _arrived(self) -> None:
        self._request()
        self._arrive()

    def _ended(self) -> None:
        if not self._server.is_rate:
            self._request()

    def _request(self) -> None:
        world, rng = self._world, self._request_rng
        text = self._texts[rng.randrange(len(self._texts))]
        start = rng.randrange(NUM_TOKENS)
        num_tokens = max(2, round(world.num_tokens * rng.uniform(1.0 - _LENGTH_SPREAD, 1.0 + _LENGTH_SPREAD)))
        if self._drafter is None:
            LocalSession(
                self._events, self._server.costs, self._verifier, self._drafting, self.count,
                {DRAFT_METHOD: text, **self._other_texts}, start, num_tokens, self._ended,
                num_pending=world.num_prompt_rows,
            ).begin()  # fmt: skip
        else:
            self._begin_remote(self._drafter, Request(num_tokens, world.num_prompt_rows, (), text, start))

    def _begin_remote(self, drafter: SimulatedDrafter, request: Request) -> None:
        self.count.change(1, self._events.now)

        def end() -> None:
            self.count.change(-1, self._events.now)
            self._ended()

        Session(
            self._events, self._server.costs, self._world.link or Link(), self._link_rng, request, self._run.length,
            self._verifier, lambda: drafter, lambda _drafter: None, end, self.tally,
        ).start()  # fmt: skip
