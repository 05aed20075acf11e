"""A client of the simulated gateways: it asks, reads at its own pace, hangs up, resumes elsewhere, and checks it all.

A promise that is broken is in `broken`. The answer is compared with the undisturbed law (toy.undisturbed).
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.gateway.request.event_cursor import EventCursor, parse_event_id
from outrider.shared.sampling_params import Grammar
from tests.simulation.http_links import HttpCall, HttpRequest, Lost
from tests.simulation.links import Network
from tests.simulation.loop import Process
from tests.simulation.wishes import Wish

# seconds; without a byte, after which a client gives a connection up
READ_TIMEOUT_S = 20.0
# seconds; between two attempts
_PAUSE_S = (0.05, 1.0)


class Records(Protocol):
    """What the simulation knows beside the client. logged_len: how far a choice's log has ever reached in Redis.
    may_lack_end: Redis has lost data since the log reached its end. logged: the tokens there now, each with its
    epoch; None: nothing.
    grammar_of: the grammar that verifiers were given for a choice. api_key: the one to
    send now; "": none. redis_was_away: for long, of its own accord.
    """

    has_lost_data: bool
    redis_was_away: bool

    def logged_len(self, request_id: str, choice: int) -> int: ...

    def may_lack_end(self, request_id: str, choice: int) -> bool: ...

    def logged(self, request_id: str, choice: int) -> list[tuple[int, int]] | None: ...

    def grammar_of(self, request_id: str, choice: int) -> Grammar | None: ...

    def api_key(self) -> str: ...


@dataclass
class Client:
    """One request's client. refused: the error that it gave up for. Loses patience at `gives_up_at`, virtual time.

    is_rival: it reads another client's stream from its beginning, and so takes it over; it does not come back.
    """

    net: Network
    process: Process
    rng: random.Random
    wish: Wish
    gateways: list[str]
    records: Records
    gives_up_at: float
    is_rival: bool = False
    read_pause_s: float = 0.0
    hangs_up_share: float = 0.0
    broken: list[str] = field(default_factory=list)
    refused: str = ""
    is_done: bool = False
    num_attempts: int = 0
    _api_key: str = ""
    _last_id: str = ""
    _has_begun: bool = False
    _cursor: EventCursor = field(default_factory=EventCursor)
    _texts: dict[int, str] = field(default_factory=dict)
    _pending: bytes = b""

    @property
    def answer_id(self) -> str:
        return self.wish.answer_id

    @property
    def num_tokens(self) -> int:
        """Of all outputs, as far as they were read."""
        return sum(seen.num_tokens for seen in self._cursor.choices if seen is not None)

    async def run(self) -> None:
        """Asks until the answer is whole, or refused for good."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.rng.uniform(0.0, 1.0) + 2.0 * self.is_rival * self.rng.random())
        self._has_begun = self.is_rival
        while not (self.is_done or self.refused or self.broken):
            if loop.time() > self.gives_up_at:
                self.broken.append(f"not answered by {self.gives_up_at:.0f} s, after {self.num_attempts} attempts")
                return
            self.num_attempts += 1
            call: HttpCall | None = None
            try:
                call = HttpCall(self.net, self.process, self.rng.choice(self.gateways), self._request())
                await self._read(call)
            except Lost:
                pass
            finally:
                if call is not None:
                    call.hang_up()
            self._pending = b""
            if self.is_rival:
                return
            await asyncio.sleep(self.rng.uniform(*_PAUSE_S))

    def _request(self) -> HttpRequest:
        self._api_key = self.records.api_key()
        headers = {"authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        if self._last_id:
            headers["last-event-id"] = self._last_id
            if self.rng.random() < 0.5:
                return HttpRequest("GET", f"/v1/streams/{self.answer_id}", headers)
            return HttpRequest("POST", self.wish.path, headers, self.wish.body())
        if self._has_begun:
            return HttpRequest("GET", f"/v1/streams/{self.answer_id}", headers)
        return HttpRequest("POST", self.wish.path, headers, self.wish.body())

    async def _read(self, call: HttpCall) -> None:
        self._has_begun = True
        leaves_after = self.rng.randint(0, 6) if self.rng.random() < self.hangs_up_share else None
        num_pieces = 0
        while (data := await call.read(READ_TIMEOUT_S)) is not None:
            if call.status != 200:
                self._refusal(call.status, data.decode())
                return
            self._pending += data
            *events, self._pending = self._pending.split(b"\n\n")
            for event in events:
                self._event(event.decode())
            if self.is_done or self.broken or self.refused:
                return
            num_pieces += 1
            if num_pieces == leaves_after:
                return
            if self.read_pause_s:
                await asyncio.sleep(self.rng.uniform(0.0, self.read_pause_s))

    def _event(self, event: str) -> None:
        lines = [line for line in event.split("\n") if not line.startswith(":")]
        fields = dict(line.split(": ", 1) for line in lines if line)
        data = fields.get("data")
        if data is None:
            return
        if data == "[DONE]":
            self.is_done = True
            return
        body = json.loads(data)
        if "error" in body:
            self._refusal(body["error"]["code"], body["error"]["message"])
            return
        self._move(fields["id"], body)

    def _move(self, event_id: str, body: dict[str, Any]) -> None:
        """Takes an event with text: it must stand right behind what was read before."""
        request_id, cursor = parse_event_id(event_id)
        if request_id != self.answer_id:
            self.broken.append(f"event {event_id} of another request")
        for choice in body["choices"]:
            index = choice["index"]
            before, now = self._cursor.of(index), cursor.of(index)
            if now is None or (
                before is not None and (now.num_tokens, now.finished) <= (before.num_tokens, before.finished)
            ):
                self.broken.append(f"event {event_id} after {self._last_id}")
            elif now.num_tokens > (logged := self.records.logged_len(request_id, index)):
                self.broken.append(f"event {event_id} of choice {index}, whose log never had more than {logged} tokens")
            self._texts[index] = self._texts.get(index, "") + self.wish.pieces(choice)
        for place, seen in enumerate(self._cursor.choices):
            now = cursor.of(place)
            if seen is not None and (now is None or now.num_tokens < seen.num_tokens):
                self.broken.append(f"event {event_id} goes back behind {self._last_id}")
        self._cursor, self._last_id = cursor, event_id
        for index, text in self._texts.items():
            expected = self._expected(index)
            if expected is not None and not expected[0].startswith(text):
                self.broken.append(f"choice {index} reads {text!r}, the law says {expected[0]!r}")

    def _refusal(self, status: int, message: str) -> None:
        """Decides whether a refusal is one that is documented for what has happened."""
        self.net.trace.add(f"  {self.process.name} is refused: {status} {message[:160]}")
        if self.is_rival and status != 500:
            return
        if status == 503 and "Redis has not answered" in message and not self.records.redis_was_away:
            self.broken.append(f"Redis was not away: {message}")
        if status in (429, 503):
            return  # try again later
        if status == 401 and self._api_key != self.records.api_key():
            return  # the key was replaced while the request was under way
        if status == 408 or (status == 409 and "taken over" in message):
            return
        if status == 409 and "already exists" in message:
            return
        if status == 404 and not self._last_id:
            self._has_begun = False
            return
        if status in (400, 404, 409) and self.records.has_lost_data:
            self.refused = f"{status} {message}"
            return
        self.broken.append(f"refused: {status} {message}")

    def check_texts(self) -> None:
        """Compares what was read with the law and with the log. To be called when all have ended."""
        for choice in range(self.wish.n):
            text, expected = self._texts.get(choice, ""), self._expected(choice)
            if self.is_done and expected is not None and not _agrees(text, expected):
                self.broken.append(f"choice {choice} is {text!r}, the law says {expected[0]!r}")
            tokens = self.records.logged(self.answer_id, choice) or []
            logged, is_whole = self.wish.shown([token_id for token_id, _ in tokens])
            if self._is_drawn_again(choice, [epoch for _, epoch in tokens]):
                is_same = True
            elif self.is_done:
                may_lack_end = self.records.may_lack_end(self.answer_id, choice)
                is_same = _agrees(text, (logged, is_whole)) or (may_lack_end and self._is_cut(text, logged))
            else:
                is_same = self.records.has_lost_data or logged.startswith(text.rstrip("\ufffd"))
            if not is_same:
                self.broken.append(f"choice {choice} is {text!r}, the log says {logged!r}")

    def _is_cut(self, text: str, logged: str) -> bool:
        """Returns whether a log that lost its end reads so: it may end within a character, or within a stop string."""
        logged = logged.rstrip("\ufffd")
        if text.startswith(logged):
            return True
        return logged.startswith(text) and any(stop.startswith(logged[len(text) :]) for stop in self.wish.stop)

    def _expected(self, choice: int) -> tuple[str, bool] | None:
        """Returns what is read of the law's output (Wish.shown); None where it is drawn afresh each time."""
        output = self.wish.expected(choice, self.records.grammar_of(self.answer_id, choice))
        return None if output is None else self.wish.shown(output)

    def _is_drawn_again(self, choice: int, epochs: list[int]) -> bool:
        """Returns whether the log has another session's tokens, which may differ and be fewer, after a loss: as nothing
        told the gateway that somebody has read the lost ones.
        """
        seen = self._cursor.of(choice)
        if seen is None or not seen.num_tokens or self.wish.kind != "sampled" or not self.records.has_lost_data:
            return False
        return bool(epochs) and epochs[min(seen.num_tokens, len(epochs)) - 1] != seen.epoch


def _agrees(text: str, shown: tuple[str, bool]) -> bool:
    """shown: what may be read, and whether it must be all of it."""
    return text == shown[0] if shown[1] else shown[0].startswith(text)
