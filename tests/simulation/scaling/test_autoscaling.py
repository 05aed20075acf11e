"""Drafters scaled 0 to 3 to 1 under load by the gauge that the chart's autoscaler names: no request is lost or changed.

A drafter that is scaled away is killed, which is worse than the SIGTERM that it would get.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
from functools import partial
from pathlib import Path

import pytest

from outrider.gateway.config import GatewayConfig
from tests.deploy.helm import render
from tests.deploy.kubernetes_objects import one
from tests.simulation.client import Client, Wish
from tests.simulation.faults import Faults
from tests.simulation.loop import Process, SimLoop
from tests.simulation.scaling.autoscaler import Autoscaler
from tests.simulation.seams import taken_over
from tests.simulation.services import DrafterNode, GatewayNode, VerifierNode
from tests.simulation.toy import MODEL
from tests.simulation.world import Seat, World

NUM_DRAFTERS = 3
SHAPES = ("completion",)
# clients; more than one drafter has places for, which are 8
NUM_AT_ONCE = 12
# seconds of virtual time; between two looks of the autoscaler, and until it must have been through
LOOKS_EVERY_S, LONGEST_S = 3.0, 300.0


class ScaledWorld(World):
    """Two verifiers, a gateway, and the number of drafters that the autoscaler asks for, at first none."""

    def __init__(self, loop: SimLoop, rng: random.Random, autoscaler: Autoscaler) -> None:
        super().__init__(loop, rng, Faults(rng, ()), SHAPES, Path())  # no fault, so no file of keys
        self._autoscaler = autoscaler
        self.clients: list[Client] = []
        self.chosen = [0]
        self._num_at_once = NUM_AT_ONCE
        self._methods = ("draft_model", "ngram")
        net = self.net
        verifiers = tuple(f"10.0.0.{1 + place}:7001" for place in range(2))
        drafters = tuple(f"10.0.1.{1 + place}:7002" for place in range(NUM_DRAFTERS))
        config = GatewayConfig(model=MODEL, verifiers=verifiers, drafters=drafters)
        self.gateways = ["gateway-0"]
        self.seats = self.seats[:1]
        self.seats += [
            Seat(
                address,
                partial(VerifierNode, net, address=address, max_num_seqs=8, drafts=False, on_open=self._on_open),
            )
            for address in verifiers
        ]
        self.seats.append(Seat("gateway-0", lambda process: GatewayNode(net, process, config)))
        self.drafters = [Seat(address, partial(DrafterNode, net, address=address)) for address in drafters]

    async def run_scaled(self) -> None:
        for seat in self.seats:
            self.start(seat)
        workers = [self.loop.outside.spawn(self._work(place)) for place in range(NUM_AT_ONCE)]
        while not self.broken and self.chosen[-1] != 1 and self.loop.time() < LONGEST_S:
            await asyncio.sleep(LOOKS_EVERY_S)
            gateway: GatewayNode = self.seats[-1].node
            self._scale(self._autoscaler.look(self.chosen[-1], gateway.service.render_metrics().decode()))
            if NUM_DRAFTERS in self.chosen:
                self._num_at_once = 1
        self._num_at_once = 0
        await asyncio.gather(*workers)
        self.seats += [seat for seat in self.drafters if seat.process is not None and not seat.process.is_dead]
        while self.leaks() and self.loop.time() < LONGEST_S + 60.0:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.5)

    def _scale(self, wanted: int) -> None:
        for place, seat in enumerate(self.drafters):
            is_there = seat.process is not None and not seat.process.is_dead
            if place < wanted and not is_there:
                self.start(seat)
            elif place >= wanted and is_there and seat.process is not None:
                self.net.kill(seat.process)
        self.chosen.append(wanted)

    async def _work(self, place: int) -> None:
        """Sends one request after another while this client is among those wanted."""
        while place < self._num_at_once:
            number = len(self.clients)
            rng = random.Random(self.rng.getrandbits(64))
            wish = Wish.drawn(rng, f"r{number}", self._methods, SHAPES)
            process = Process(self.loop, f"client-{number}")
            client = Client(self.net, process, rng, wish, self.gateways, self, gives_up_at=self.loop.time() + LONGEST_S)
            self.clients.append(client)
            await process.spawn(client.run())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_drafters_come_under_load_and_go_without_it_and_nothing_is_lost(seed: int) -> None:
    objects = render({"model": MODEL, "autoscaling": {"drafter": {"minReplicas": 0, "maxReplicas": NUM_DRAFTERS}}})
    autoscaler = Autoscaler(one(objects, "HorizontalPodAutoscaler", "drafter"))
    rng = random.Random(seed)
    loop = SimLoop(random.Random(rng.getrandbits(64)))
    gc.disable()  # or it would close forgotten tasks at any moment
    try:
        with taken_over(loop, random.Random(rng.getrandbits(64))):
            world = ScaledWorld(loop, rng, autoscaler)
            loop.run_until_complete(world.run_scaled())
            broken = world.check(world.clients)
            loop.dispose()
    finally:
        loop.close()
        gc.enable()
    assert broken == []
    steps = [number for number, _ in itertools.groupby(world.chosen)]
    assert (steps[0], max(steps), steps[-1]) == (0, NUM_DRAFTERS, 1)
    assert all(client.is_done and not client.refused for client in world.clients)
    assert len(world.clients) > NUM_AT_ONCE
