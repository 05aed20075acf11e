"""Several gateways before one fleet and one Redis that keeps its data: to be killed, restarted, frozen.

And a client of event streams that notes ids, stops where it is told to, and goes on.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from e2e_stack import DEMO_DRAFT, DEMO_TARGET, METHODS, PATIENT, metric_of, wait_until

from outrider.client.stack.commands import StackSettings, StackState
from outrider.client.stack.processes import Stack
from tests.e2e.e2e_pace import FEW_AHEAD, PAUSE_S, paced
from tests.ports import server_port
from tests.redis_server import RedisServer

START_TIMEOUT_S = 150.0
HTTP_TIMEOUT_S = 120.0


@dataclass
class Gateway:
    """One gateway process."""

    url: str
    grpc_address: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def metric(self, name: str, **labels: str) -> float:
        return metric_of(self.url, name, **labels)

    def client(self, **fields: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=HTTP_TIMEOUT_S, **fields)


@dataclass
class Fleet:
    """Redis is paced for the gateways that are started here (e2e_pace.py), not for the one at `state.url`."""

    state: StackState
    redis: RedisServer
    run_dir: Path
    started: list[Gateway] = field(default_factory=list)
    pause_s: float = PAUSE_S
    _around: ExitStack = field(default_factory=ExitStack)
    _paced_url: str = ""

    def gateway(self, **settings: str) -> Gateway:
        """Another one, ready to serve."""
        if not self._paced_url:
            redis_port = int(self.redis.url.rpartition(":")[2].split("/")[0])
            self._paced_url = self._around.enter_context(paced(redis_port, self.pause_s))
        settings = {"draft_timeout_ms": PATIENT[1]} | settings
        log_path = self.run_dir / f"gateway-{len(self.started)}.log"
        grpc_port = settings.pop("grpc_port", str(server_port()))
        with log_path.open("wb") as log_file:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "outrider.gateway", "--model", str(DEMO_TARGET), "--port", "0"),
                    *("--grpc-port", grpc_port, "--redis-url", self._paced_url, *FEW_AHEAD),
                    *("--verifiers", ",".join(self.state.verifiers), "--drafters", ",".join(self.state.drafters)),
                    *(part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)),
                ],
                stdout=log_file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        gateway = Gateway("", f"127.0.0.1:{grpc_port}", process)
        self.started.append(gateway)

        def serves() -> bool:
            assert process.poll() is None, log_path.read_text()
            match = re.search(r"serving on (\S+)", log_path.read_text())
            gateway.url = f"http://{match[1]}" if match else ""
            if not match:
                return False
            with suppress(httpx.HTTPError):
                return httpx.get(f"{gateway.url}/ready", timeout=5).status_code == 200
            return False

        wait_until(serves, START_TIMEOUT_S, f"{log_path.name}: ready")
        return gateway

    def close(self) -> None:
        """Ends the gateways that were started here."""
        for gateway in self.started:
            if gateway.process.poll() is None:
                gateway.process.send_signal(signal.SIGCONT)
                gateway.kill()
        self._around.close()
        self._paced_url = ""


@contextmanager
def run_fleet(
    run_dir: Path, *, draft_model: str = str(DEMO_DRAFT), methods: tuple[str, ...] = METHODS
) -> Iterator[Fleet]:
    """A verifier, a drafter, a Redis, and a gateway at `state.url` that no test kills.

    Without a draft model the drafter needs no torch and is there at once.
    """
    redis_dir = run_dir / "redis-data"
    redis_dir.mkdir()
    with RedisServer(redis_dir) as redis:
        settings = StackSettings(
            model=str(DEMO_TARGET),
            draft_model=draft_model,
            methods=methods,
            port=0,
            grpc_port=server_port(),
            redis_url=redis.url,
            gateway_args=PATIENT,
        )
        stack = Stack(settings, run_dir, lambda _message: None)
        fleet = Fleet(stack.start(), redis, run_dir)
        try:
            yield fleet
        finally:
            fleet.close()
            stack.stop()


# ---- a client of event streams ----------------------------------------------------------------------------------


@dataclass
class Told:
    """What a client was told: events in order, then how it ended."""

    status: int = 0
    ids: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    error: dict[str, Any] | None = None
    done: bool = False
    broken: bool = False

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(block.partition("data: ")[2]) for block in self.blocks]

    @property
    def last_id(self) -> str:
        return self.ids[-1]

    def text(self, index: int = 0) -> str:
        return "".join(choice["text"] for choice in self._choices(index))

    def token_text(self, index: int = 0) -> str:
        """Of the tokens, shown or held back."""
        return "".join(text for choice in self._choices(index) for text in choice["outrider"]["token_texts"])

    def token_ids(self, index: int = 0) -> list[int]:
        return [token_id for choice in self._choices(index) for token_id in choice["outrider"]["token_ids"]]

    def num_tokens(self) -> int:
        return sum(len(self.token_ids(index)) for index in self.indices)

    @property
    def indices(self) -> set[int]:
        return {choice["index"] for event in self.events for choice in event["choices"]}

    def finish_reason(self, index: int = 0) -> str | None:
        reasons = [choice["finish_reason"] for choice in self._choices(index) if choice["finish_reason"]]
        assert len(reasons) <= 1
        return reasons[0] if reasons else None

    def _choices(self, index: int) -> list[dict[str, Any]]:
        return [
            choice
            for event in self.events
            for choice in event["choices"]
            if choice["index"] == index and "outrider" in choice
        ]

    def __add__(self, rest: Told) -> Told:
        return Told(
            rest.status,
            self.ids + rest.ids,
            self.blocks + rest.blocks,
            rest.error,
            rest.done,
            rest.broken,
        )


async def read_events(
    http: httpx.AsyncClient,
    method: str,
    path: str,
    *,
    body: Mapping[str, Any] | None = None,
    last_event_id: str = "",
    until: Callable[[Told], bool] = lambda _told: False,
) -> Told:
    """Reads to the end, or hangs up when `until` holds; a connection that breaks is noted, not raised."""
    told = Told()
    headers = {"last-event-id": last_event_id} if last_event_id else {}
    with suppress(httpx.TransportError):
        told.broken = True
        async with http.stream(method, path, json=body, headers=headers) as reply:
            told.status = reply.status_code
            if reply.status_code != 200:
                told.error = json.loads(await reply.aread())["error"]
                told.broken = False
                return told
            lines: list[str] = []
            async for line in reply.aiter_lines():
                if line:
                    lines += [line] if not line.startswith(":") else []  # comments are no events
                    continue
                if not lines:
                    continue
                _take("\n".join(lines), told)
                lines.clear()
                if told.done or told.error or until(told):
                    break
        told.broken = False
    return told


def _take(block: str, told: Told) -> None:
    if block == "data: [DONE]":
        told.done = True
        return
    data = json.loads(block.rpartition("data: ")[2]) if block.startswith("data: ") else None
    if data is not None:
        assert set(data) == {"error"}, f"an event without an id: {block}"
        told.error = data["error"]
        return
    told.ids.append(block.split("\n")[0].removeprefix("id: "))
    told.blocks.append(block)
