"""A conversation over the Python client: what was said so far, and the next answer token by token.

Not here: the terminal (cli_chat.py).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing

from client.api_params import SamplingParams
from client.api_results import Update
from client.api_sync import OutriderClient
from client.generate import StreamedToken, StreamEnd


class Conversation:
    """`ask` adds to it, `reset` forgets all but the system message. One question at a time."""

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
        """The answer as it comes; close the iterator to stop it. What was said until then stays in the conversation,
        a question that got no word in answer does not. Raises OutriderError."""
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
    """One per token where their texts are the update's: it leaves out the end-of-turn token, and may hold text back."""
    if "".join(token.text for token in update.tokens) == update.text:
        for token in update.tokens:
            yield StreamedToken(token.token_id, token.text, token.origin)
    elif update.text:
        last = update.tokens[-1]
        yield StreamedToken(last.token_id, update.text, last.origin)
