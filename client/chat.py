"""A chat conversation over the Python client: its history, and each reply streamed token by token.

Not here: the terminal (cli/chat.py).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing

from outrider.client.api.blocking import OutriderClient
from outrider.client.api.results import Update
from outrider.client.generate import StreamedToken, StreamEnd
from outrider.shared.request_params import SamplingParams


class Conversation:
    """A chat history: `ask` adds a turn, `reset` drops all but the system message. Serves one `ask` at a time."""

    def __init__(self, client: OutriderClient, params: SamplingParams, system: str = "") -> None:
        self._client = client
        self._params = params
        self._system = system
        self._messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        return tuple(self._messages)

    def ask(self, question: str) -> Generator[StreamedToken | StreamEnd, None, None]:
        """Streams the reply; close the iterator to stop it. A partial reply stays in the history; a question without
        any reply does not. Raises OutriderError."""
        self._messages.append({"role": "user", "content": question})
        said: list[str] = []
        try:
            with closing(self._client.stream(self._messages, self._params)) as updates:
                for update in updates:
                    said.append(update.text)
                    yield from _shown(update)
                    if update.completion is not None:
                        yield StreamEnd.of(update.completion)
        finally:
            if any(said):
                self._messages.append({"role": "assistant", "content": "".join(said)})
            else:
                self._messages.pop()


def _shown(update: Update) -> Iterator[StreamedToken]:
    """The update's tokens, or its text as one token where they differ (stop tokens, text held back)."""
    if "".join(token.text for token in update.tokens) == update.text:
        for token in update.tokens:
            yield StreamedToken(token.token_id, token.text, token.origin)
    elif update.text:
        last = update.tokens[-1]
        yield StreamedToken(last.token_id, update.text, last.origin)
