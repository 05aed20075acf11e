"""Measures how well `--slo-itl-ms` is met: inter-token latency of streams while long prompts are prefilled.

Two streams decode with `auto`, and a new long prompt arrives every 1.5 s. One stack per target, including none. Rows go
to benchmarks/results/promised_itl.jsonl.

    python -m benchmarks.promised_itl
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.load import LoadResult, Shape, run_load
from benchmarks.prompts import code_prompts
from benchmarks.records import quantiles, save_rows
from benchmarks.screen import console, say, table
from benchmarks.simulation.stack import expanded_target
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.processes import Stack

_NUM_STREAMS = 2
_NUM_LONG_PROMPTS = 12
_LONG_PROMPT_CHARS = 3500
_EVERY_S = 1.5


def main(
    models: Annotated[Path, typer.Option(help="Folder of the demo family.")] = Path("models"),
    promises_ms: Annotated[str, typer.Option(help="Latency targets in ms, comma-separated; 0: none.")] = "0,80,40",
    max_tokens: Annotated[int, typer.Option(help="Tokens per decoding stream and request.")] = 128,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/promised_itl.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.promised_itl --promises-ms 0,50"""
    rows: list[dict[str, Any]] = []
    with expanded_target(models / "demo-target", say) as target:
        for promise_ms in map(float, promises_ms.split(",")):
            say(f"{promise_ms:g} ms: starting the stack")
            run_dir = target.with_name(f"run-{promise_ms:g}")
            rows.append(_measure(target, models / "demo-draft", run_dir, promise_ms, max_tokens))
    _show(rows)
    if save:
        console.print(f"rows appended to {save_rows('promised_itl', rows)}")


def _measure(target: Path, draft: Path, run_dir: Path, promise_ms: float, max_tokens: int) -> dict[str, Any]:
    promise = ("--slo-itl-ms", str(promise_ms))
    settings = StackSettings(
        model=str(target),
        draft_model=str(draft),
        methods=("draft_model",),
        port=0,
        grpc_port=-1,
        verifier_args=promise,
        gateway_args=promise,
    )
    with Stack(settings, run_dir, lambda _message: None, in_foreground=True) as state:
        asyncio.run(run_load(state.url, code_prompts(2 * _NUM_STREAMS), Shape(max_tokens, "auto", 5), _NUM_STREAMS))
        decoding, reading = asyncio.run(_load(state.url, max_tokens))
    gaps_s = [gap_s for request in decoding.requests for gap_s in request.pieces_s]
    return {
        "promise_ms": promise_ms,
        "piece_ms": {name: 1e3 * gap_s for name, gap_s in quantiles(gaps_s).items()},
        "share_in_time": sum(1e3 * gap_s <= promise_ms for gap_s in gaps_s) / len(gaps_s) if promise_ms else None,
        "tokens_per_s": decoding.tokens_per_s,
        "first_token_of_long_prompts_ms": 1e3 * median(request.first_token_s for request in reading),
    }


async def _load(url: str, max_tokens: int) -> tuple[LoadResult, list[Any]]:
    """Runs the decoding streams while long prompts arrive; returns the results of both."""
    long_prompts = code_prompts(_NUM_LONG_PROMPTS, num_chars=_LONG_PROMPT_CHARS)

    async def read(index: int) -> Any:
        await asyncio.sleep(_EVERY_S * (index + 0.5))
        # A unique first line, so that nothing of it is in the prefix cache.
        return (await run_load(url, [f"# {index}\n{long_prompts[index]}"], Shape(1, "off", 1), 1)).requests[0]

    reading = asyncio.gather(*(read(place) for place in range(_NUM_LONG_PROMPTS)))
    requests, seconds = [], 0.0
    while not reading.done():
        decoded = await run_load(url, code_prompts(_NUM_STREAMS), Shape(max_tokens, "auto", 5), _NUM_STREAMS)
        requests += decoded.requests
        seconds += decoded.seconds
    return LoadResult(seconds, requests), await reading


def _show(rows: list[dict[str, Any]]) -> None:
    shown = table("promised", "in time", "piece p50", "p80", "p99", "tokens/s", "first token of long prompts")
    for row in rows:
        pieces = row["piece_ms"]
        shown.add_row(
            *((f"{row['promise_ms']:g} ms", f"{row['share_in_time']:.1%}") if row["promise_ms"] else ("nothing", "")),
            *(f"{pieces[name]:.0f} ms" for name in ("p50", "p80", "p99")),
            f"{row['tokens_per_s']:.0f}",
            f"{row['first_token_of_long_prompts_ms']:.0f} ms",
        )
    console.print(shown)


if __name__ == "__main__":
    typer.run(main)
