"""Sends the requests of a replay file again and shows both answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from .answers import ServerError
from .verdicts import Replay
from .wire import Server


class BadReplayFile(ValueError):
    """A line of the file is no replay."""


def read_replays(path: Path) -> Iterator[Replay]:
    """Raises BadReplayFile, and OSError for a file that cannot be read."""
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            fields = json.loads(line)
            requests = tuple(dict(request) for request in fields["requests"])
            texts = tuple(str(text) for text in fields["texts"])
            test, expected, path_asked = (str(fields[name]) for name in ("test", "expected", "path"))
            replay = Replay(test, expected, requests, texts, path_asked, bool(fields["at_once"]))
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise BadReplayFile(f"{path}, line {number}: not a replay: {error!r}") from error
        if len(requests) != len(texts):
            raise BadReplayFile(f"{path}, line {number}: {len(requests)} requests but {len(texts)} texts")
        yield replay


def send_again(server: Server, replay: Replay) -> str:
    """What was expected, and for each request its text then and now. Raises NoAnswerInTime."""
    width = len(replay.requests) if replay.at_once else 1
    answers = server.ask_all(replay.path, replay.requests, max(width, 1))
    how = ", all at once" if replay.at_once else ""
    lines = [f"{replay.test}: expected {replay.expected}{how}"]
    for request, then, now in zip(replay.requests, replay.texts, answers, strict=True):
        told = f"server error {now}" if isinstance(now, ServerError) else repr(now[0].shown)
        lines += [f"  request {json.dumps(request)}", f"  then    {then!r}", f"  now     {told}"]
    return "\n".join(lines)
