"""Counts the gateway's function calls for one streamed completion: `python -m benchmarks.gateway_calls`.

A stack of the demo pair drafts in its verifier. A second gateway on the same fleet runs in this process, so that
`sys.setprofile` sees each call of its event loop's thread. Requests before the traced one fill caches and let `auto`
learn. A coroutine that is resumed counts as called. Other packages' functions are not counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import urllib.request
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.prompts import code_prompts
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.own_redis import redis_url_of
from outrider.client.stack.processes import Stack, free_port
from outrider.gateway.__main__ import serve

_ROOT = Path(__file__).resolve().parents[1]
# folders; whose functions the gateway's calls are counted in
_COUNTED = ("gateway", "shared")
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class CallCounter:
    """Counts calls by code object while it is the thread's profile function."""

    def __init__(self) -> None:
        self._calls: Counter[CodeType] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._calls[frame.f_code] += 1

    def by_function(self) -> dict[tuple[str, str], int]:
        """(file, function) -> calls, for the counted folders; files as paths in the repository."""
        found: Counter[tuple[str, str]] = Counter()
        for code, count in self._calls.items():
            path = Path(code.co_filename).resolve()  # outrider/ has links
            if any(path.is_relative_to(_ROOT / folder) for folder in _COUNTED):
                found[str(path.relative_to(_ROOT)), code.co_qualname] += count
        return found


def _stream(url: str, prompt: str, num_tokens: int) -> int:
    """Reads one streamed completion; returns its number of events."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        lines: list[bytes] = list(reply)
    return sum(line.startswith(b"data: ") for line in lines) - 1


async def _traced(arguments: list[str], url: str, num_tokens: int, num_before: int) -> tuple[CallCounter, int]:
    """Runs a gateway in this thread, whose clients are in others."""
    gateway = asyncio.create_task(serve(arguments))
    prompts = code_prompts(num_before + 1)
    try:
        while not await asyncio.to_thread(_is_ready, url):
            if gateway.done():
                gateway.result()
            await asyncio.sleep(0.1)
        for prompt in prompts[:-1]:
            await asyncio.to_thread(_stream, url, prompt, num_tokens)
        counter = CallCounter()
        sys.setprofile(counter)
        try:
            num_events = await asyncio.to_thread(_stream, url, prompts[-1], num_tokens)
        finally:
            sys.setprofile(None)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)  # how a gateway is asked to end
        await gateway
    return counter, num_events


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _by_room(calls: dict[tuple[str, str], int]) -> Table:
    table = Table("folder", "calls", "files", "most called")
    rooms: dict[str, dict[tuple[str, str], int]] = {}
    for (file, function), count in calls.items():
        rooms.setdefault(str(Path(file).parent), {})[file, function] = count
    for room, own in sorted(rooms.items(), key=lambda item: -sum(item[1].values())):
        (file, function), most = max(own.items(), key=lambda item: item[1])
        files = len({name for name, _ in own})
        table.add_row(room, str(sum(own.values())), str(files), f"{Path(file).name}: {function} {most}")
    table.add_row("all", str(sum(calls.values())), str(len({name for name, _ in calls})), "")
    return table


def main(
    num_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the traced stream.")] = 64,
    num_before: Annotated[int, typer.Option(min=0, help="Streams before it.")] = 8,
    functions: Annotated[int, typer.Option(min=0, help="Print this many of the most called functions too.")] = 0,
) -> None:
    """Counts the gateway's function calls, by folder, for one streamed completion."""
    with ExitStack() as exits:
        run_dir = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        models = _ROOT / "models"
        settings = StackSettings(
            str(models / "demo-target"), str(models / "demo-draft"), port=0, grpc_port=-1, num_drafters=0
        )
        stack = Stack(settings, run_dir, console.print)
        exits.callback(stack.stop)
        state = stack.start()
        port = free_port()
        os.environ["OUTRIDER_REDIS_URL"] = redis_url_of(state)
        arguments = [
            *("--model", settings.model, "--port", str(port), "--grpc-port", "-1", "--drafters", ""),
            *("--verifiers", ",".join(state.verifiers), "--log-level", "warning"),
        ]
        counter, num_events = asyncio.run(_traced(arguments, f"http://127.0.0.1:{port}", num_tokens, num_before))
    calls = counter.by_function()
    console.print(f"{num_tokens} tokens in {num_events} events")
    console.print(_by_room(calls))
    for (file, function), count in sorted(calls.items(), key=lambda item: -item[1])[:functions]:
        console.print(f"{count:6}  {file}: {function}")


if __name__ == "__main__":
    typer.run(main)
