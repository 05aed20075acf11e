"""`python -m tests.attacks.table`: a neighbour's short requests beside each attack that once stopped them, in one run.

A row is the attack's number in docs/track-record.md. Beside them stand two rows of no attack, to tell its slowdown from
that of any load: a process that takes one core, and ordinary streams of another key. Exit code 1 when a neighbour is
refused.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import grpc.aio
import httpx
import typer
from rich.console import Console
from rich.table import Table

from tests.attacks.attacks import Request, json_request
from tests.attacks.holding import HOLDS, NUM_INNOCENTS, Hold, HoldOutcome, http_client, innocents_beside
from tests.attacks.stack import AttackedStack, running_stack

# calls; begun and at once cancelled on one HTTP/2 connection, for as long as the neighbours ask
_NUM_RESETS = 100
# streams; of one client that is busy, and attacks nobody
_NUM_ORDINARY = 16
_console = Console(width=140)


def _doubling_schema(depth: int) -> dict[str, Any]:
    """A schema whose paths double with each of its definitions."""
    definitions = {f"d{place}": {"anyOf": [{"$ref": f"#/$defs/d{place + 1}"}] * 2} for place in range(depth)}
    return {"$defs": {**definitions, f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0", "type": "object"}


def _schemas() -> list[Request]:
    tool = {"type": "function", "function": {"name": "f", "parameters": _doubling_schema(24)}}
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "max_tokens": 4}
    return [json_request("/v1/chat/completions", **chat, tool_choice=choice) for choice in ("auto", "none")]


def _outputs_under_an_ambiguous_grammar() -> list[Request]:
    grammar = {"grammar": 'start: s\ns: s s | s s s | "a" | "b"'}
    return [json_request("/v1/completions", prompt="a", n=64, max_tokens=400, structured_outputs=grammar)]


def _batches() -> list[Request]:
    return [
        json_request("/v1/completions", prompt=["Once upon a time"] * 256, max_tokens=100, ignore_eos=True)
        for _ in range(2)
    ]


def _joins() -> list[Request]:
    messages = [{"role": "developer", "content": "x"}] * 80_000
    return [json_request("/v1/chat/completions", messages=messages, max_tokens=4) for _ in range(2)]


def _sent(requests: Callable[[], list[Request]]) -> Hold:
    """The requests are under way; the rest of them are given up once the neighbours are done."""

    @asynccontextmanager
    async def hold(stack: AttackedStack, attackers: Counter[str]) -> AsyncIterator[None]:
        headers = {"Content-Type": "application/json"}
        async with http_client(stack, stack.attacker_key) as http:
            sent = [
                asyncio.create_task(http.post(request.path, content=request.body, headers=headers))
                for request in requests()
            ]
            await asyncio.sleep(0.5)  # the attack comes first
            yield
            for task in sent:
                task.cancel()
            answers = await asyncio.gather(*sent, return_exceptions=True)
        for answer in answers:
            attackers[str(answer.status_code) if isinstance(answer, httpx.Response) else type(answer).__name__] += 1

    return hold


@asynccontextmanager
async def _unread_streams(stack: AttackedStack, attackers: Counter[str]) -> AsyncIterator[None]:
    """60 streams whose reader reads nothing."""
    address = httpx.URL(stack.state.url)
    request = json_request("/v1/completions", prompt="a", max_tokens=400, stream=True, ignore_eos=True)
    head = (
        f"POST {request.path} HTTP/1.1\r\nhost: {address.host}\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {stack.attacker_key}\r\ncontent-length: {len(request.body)}\r\n\r\n"
    ).encode()
    writers = []
    for _ in range(60):
        _, writer = await asyncio.open_connection(address.host, address.port, limit=1)
        writer.write(head + request.body)
        writers.append(writer)
    attackers["unread"] += len(writers)
    await asyncio.sleep(0.5)
    yield
    for writer in writers:
        writer.transport.abort()


def _ordinary_streams() -> list[Request]:
    return [
        json_request("/v1/completions", prompt=f"Story {place}:", max_tokens=2000, ignore_eos=True)
        for place in range(_NUM_ORDINARY)
    ]


@asynccontextmanager
async def _busy_core(_stack: AttackedStack, attackers: Counter[str]) -> AsyncIterator[None]:
    """A process that has nothing to do with the stack, and computes."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    attackers["busy process"] += 1
    try:
        await asyncio.sleep(0.5)
        yield
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def _rapid_reset(stack: AttackedStack, attackers: Counter[str]) -> AsyncIterator[None]:
    """HTTP/2 streams that are opened and reset, again and again."""
    async with grpc.aio.insecure_channel(stack.state.grpc_address) as channel:
        generate: Any = channel.unary_stream("/outrider.v1.Gateway/Generate")
        metadata = (("authorization", f"Bearer {stack.attacker_key}"),)

        async def reset() -> None:
            while True:
                calls = [generate(b"\n\x01a", metadata=metadata) for _ in range(_NUM_RESETS)]
                await asyncio.sleep(0.02)
                for call in calls:
                    attackers["reset"] += call.cancel()

        task = asyncio.create_task(reset())
        await asyncio.sleep(0.5)
        yield
        task.cancel()


ROWS: dict[str, Hold] = {
    "alone": HOLDS["nothing"],
    "no attack: another process takes one core": _busy_core,
    "no attack: 16 ordinary requests of another key": _sent(_ordinary_streams),
    "1: a schema that doubles 24 times": _sent(_schemas),
    "2: 64 outputs, ambiguous grammar": _sent(_outputs_under_an_ambiguous_grammar),
    "3: 515 half-sent bodies": HOLDS["515 half-sent bodies"],
    "4: 512 background responses": HOLDS["512 responses in the background"],
    "6: two batches of 256 outputs": _sent(_batches),
    "6: 60 unread streams": _unread_streams,
    "7: 80,000 developer messages, twice": _sent(_joins),
    "11: rapid reset over HTTP/2": _rapid_reset,
}


async def measure(stack: AttackedStack, tell: Callable[[str], None]) -> list[HoldOutcome]:
    outcomes = []
    for name, hold in ROWS.items():
        tell(name)
        attackers: Counter[str] = Counter()
        started = time.monotonic()
        async with hold(stack, attackers):
            outcomes.append(await innocents_beside(stack, name, attackers))
        tell(f"  {_shown(outcomes[-1], outcomes[0])}, {time.monotonic() - started:.0f} s")
    return outcomes


def _shown(outcome: HoldOutcome, alone: HoldOutcome) -> tuple[str, ...]:
    why = "".join(f", {what}"[:60] for what in outcome.refused)
    return (
        f"{outcome.refused.total()} of {2 * NUM_INNOCENTS}{why}",
        f"{outcome.p50_s:.2f} s",
        f"{outcome.p50_s / alone.p50_s:.1f} x",
        f"{outcome.slowest_s:.2f} s",
        ", ".join(f"{count} x {what}" for what, count in sorted(outcome.attackers.items())),
    )


def main(
    drafters: Annotated[int, typer.Option(help="Drafters of the stack, besides the verifier's own methods.")] = 0,
) -> None:
    """Neighbours refused and slowed by each attack. Its times need a quiet machine; its ratios are of one run."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        running_stack(Path(folder), num_drafters=drafters) as stack,
    ):
        outcomes = asyncio.run(measure(stack, _console.print))
    table = Table("attack", "refused", "p50", "slower", "slowest", "attackers")
    for outcome in outcomes:
        table.add_row(outcome.name, *_shown(outcome, outcomes[0]))
    _console.print(table)
    sys.exit(any(outcome.refused for outcome in outcomes))


if __name__ == "__main__":
    typer.run(main)
