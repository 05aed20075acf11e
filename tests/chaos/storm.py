"""What happens to the fleet: one misfortune after another, drawn from a seed, each mended after a while."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import grpc.aio

from outrider.shared import rpc
from outrider.v1 import common_pb2, verifier_pb2_grpc
from tests.chaos.fleet import Fleet, Part

_WEIGHTS = {
    ("kill", "drafter"): 4,
    ("pause", "drafter"): 3,
    ("kill", "verifier"): 2,
    ("pause", "verifier"): 2,
    ("kill", "gateway"): 3,
    ("pause", "gateway"): 2,
    ("cut", "verifier"): 3,
    ("cut", "drafter"): 2,
    ("delay", "drafter"): 2,
    ("delay", "verifier"): 1,
    ("restart", "redis"): 1,
    ("pause", "redis"): 2,
}
# No misfortune, but it must change as little; as often as all others together.
_SWAPS = {("swap", "verifier"): sum(_WEIGHTS.values())}


class Storm:
    """`run` until cancelled; `settle` afterwards brings everything back."""

    def __init__(self, fleet: Fleet, seed: int, *, mean_pause_s: float) -> None:
        self.counts: Counter[str] = Counter()
        self._fleet = fleet
        self._rng = random.Random(seed)
        self._mean_pause_s = mean_pause_s
        # What has not happened yet: each once, however short the storm.
        self._weights = _WEIGHTS | (_SWAPS if fleet.target.heads else {})
        self.due = self._rng.sample(list(self._weights), len(self._weights))
        self._mending: set[asyncio.Task[None]] = set()
        self._hurt: set[str] = set()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / self._mean_pause_s))
            is_due = bool(self.due)
            what, kind = (
                self.due.pop() if is_due else self._rng.choices(list(self._weights), list(self._weights.values()))[0]
            )
            name = self._victim(kind)
            if name is None:
                if is_due:  # later, when the last victims are well again
                    self.due.insert(0, (what, kind))
                continue
            self.counts[f"{what} {kind}"] += 1
            task = asyncio.create_task(self._strike(what, name))
            self._mending.add(task)
            task.add_done_callback(self._mending.discard)

    async def settle(self) -> None:
        """Waits for all that is being mended."""
        await asyncio.gather(*self._mending)

    def _victim(self, kind: str) -> str | None:
        """One that is well. Of drafters all may be gone, of the others one is left."""
        names = ["redis"] if kind == "redis" else [part.name for part in self._fleet.of_kind(kind)]
        well = [name for name in names if name not in self._hurt]
        if not well or (kind in ("verifier", "gateway") and len(well) < 2):
            return None
        return self._rng.choice(well)

    async def _strike(self, what: str, name: str) -> None:
        self._hurt.add(name)
        seconds = self._rng.uniform(0.2, 4.0)
        try:
            if name == "redis":
                await self._strike_redis(what, seconds)
            elif what == "swap":
                await self._swap(self._fleet.parts[name])
            elif what == "cut":
                self._fleet.proxies[name].cut()
            elif what == "delay":
                self._fleet.proxies[name].delay_s = self._rng.uniform(0.005, 0.1)
                await asyncio.sleep(seconds)
                self._fleet.proxies[name].delay_s = 0.0
            else:
                await self._strike_process(what, self._fleet.parts[name], seconds)
        finally:
            self._hurt.discard(name)

    async def _swap(self, part: Part) -> None:
        head = self._rng.choice(self._fleet.target.heads)
        async with rpc.open_channel(f"{part.host}:{part.port}") as channel:
            stub = verifier_pb2_grpc.VerifierStub(channel)
            try:
                await stub.LoadDraft(common_pb2.LoadDraftRequest(path=str(head)), timeout=120)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:  # sessions still have older versions
                    raise
                self.counts["swap refused"] += 1

    async def _strike_process(self, what: str, part: Part, seconds: float) -> None:
        if what == "pause":
            part.pause()
            await asyncio.sleep(seconds)
            part.go_on()
            return
        part.kill()
        await asyncio.sleep(seconds / 4)
        part.start()
        await self._fleet.wait_serving(part)

    async def _strike_redis(self, what: str, seconds: float) -> None:
        if what == "pause":
            self._fleet.redis.freeze()
            await asyncio.sleep(seconds)
            self._fleet.redis.thaw()
        else:
            self._fleet.redis.kill()
            await asyncio.sleep(seconds / 4)
            await asyncio.to_thread(self._fleet.redis.start)
