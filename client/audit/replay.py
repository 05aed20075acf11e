"""Sends the requests of a replay file again and shows both answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from .verdicts import Replay
from .wire import Server, ServerError


class BadReplayFile(ValueError):
    """A line of the file is no replay."""


def read_replays(path: Path) -> Iterator[Replay]:
    """Raises BadReplayFile, and OSError for a file that cannot be read."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            fields = json.loads(line)
            requests = tuple(dict(request) for request in fields["requests"])
            texts = tuple(str(text) for text in fields["texts"])
            replay = Replay(str(fields["test"]), str(fields["expected"]), requests, texts, str(fields["path"]))
        except (ValueError, KeyError, TypeError) as error:
            raise BadReplayFile(f"{path}, line {number}: not a replay: {error!r}") from error
        if len(requests) != len(texts):
            raise BadReplayFile(f"{path}, line {number}: {len(requests)} requests but {len(texts)} texts")
        yield replay


def send_again(server: Server, replay: Replay) -> str:
    """What was expected, and for each request its text then and now."""
    lines = [f"{replay.test}: expected {replay.expected}"]
    for request, then in zip(replay.requests, replay.texts, strict=True):
        try:
            answer = server.ask(replay.path, request)[0]
            now = answer.text or json.dumps([vars(call) for call in answer.calls])
        except ServerError as error:
            now = f"server error {error}"
        lines += [f"  request {json.dumps(request)}", f"  then    {then!r}", f"  now     {now!r}"]
    return "\n".join(lines)
