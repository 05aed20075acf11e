"""Work on the bodies of requests: in the event loop while they are short, on a thread where they are long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from outrider.gateway.admission.auth import caller_of
from outrider.gateway.admission.body_budget import ANSWER_RATIO, INLINE_BYTES, BodyBudget, Held
from outrider.gateway.servers.http.limits import parse_json, read_body
from outrider.gateway.servers.http.long_json import LongJson
from outrider.gateway.servers.service import GatewayService

# texts; tokenized inline, about 2 ms
_MAX_TEXTS = 64

T = TypeVar("T")


class BodyWork:
    def __init__(self, service: GatewayService, bodies: BodyBudget) -> None:
        self._service = service
        self._bodies = bodies

    async def parsed(self, request: Request, work: Callable[[object], T], answer_ratio: int = 0) -> T:
        """Applies `work` to the body's JSON; long bodies are parsed and processed on a thread, a few at a time, so that
        streams keep flowing. answer_ratio: the answer's bytes per byte of the body, for which room is kept.
        """
        with closing(caller_of(request).held or Held(self._bodies)) as held:
            body = await read_body(request, self._service.limits.max_body_bytes, held)
            held.add_body(answer_ratio * len(body))
            if len(body) <= INLINE_BYTES and not _has_many_texts(parsed := parse_json(body)):
                return work(parsed)
            return await self._bodies.on_thread(lambda: work(parse_json(body)), len(body))

    async def kept(self, request: Request) -> bytes:
        """Reads the body, which counts until the request has ended."""
        held = caller_of(request).held or Held(BodyBudget())
        return await read_body(request, self._service.limits.max_body_bytes, held)

    async def aside(self, work: Callable[[], T], num_bytes: int) -> T:
        """Runs `work` on num_bytes of a body on a thread, in its turn."""
        return await self._bodies.on_thread(work, num_bytes)

    async def answered(self, request: Request, work: Callable[[object], Mapping[str, object]]) -> Response:
        """Returns `work` on the body's JSON, as JSON; a long answer counts until it is sent."""
        answer = await self.parsed(request, lambda body: LongJson(work(body)), ANSWER_RATIO)
        if (held := caller_of(request).held) is not None:
            held.add_answer(len(answer.body))
        return answer


def _has_many_texts(body: object) -> bool:
    """Returns whether it has more texts to tokenize than streams should wait for: about 0.03 ms each, however short."""
    if not isinstance(body, dict):
        return False
    lists, messages = [body.get(name) for name in ("bad_words", "prompt")], body.get("messages")
    if isinstance(messages, list) and len(messages) > 1 and isinstance(messages[0], list):
        return True  # several conversations, each with a template to fill in
    return any(isinstance(texts, list) and sum(isinstance(text, str) for text in texts) > _MAX_TEXTS for texts in lists)
