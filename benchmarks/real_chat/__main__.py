"""Chat on real weights, with peers: `python -m benchmarks.real_chat FILE.gguf`.

One run on one machine, all systems serving at once, alternating: this one plain, with every method that it serves and
with `auto`; llama.cpp's server on the same file; vLLM's CPU build on the same weights, dequantised. The questions are
in no data set, answers end where the model ends them, and no run sees the answers or prefixes of another.
Figures are medians over rounds, each with other questions. Rows go to benchmarks/results/real_chat.jsonl.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.real_chat import report, systems
from benchmarks.real_chat.questions import QUESTIONS
from benchmarks.real_chat.traffic import Run, Variant, send
from benchmarks.records import quantiles, save_rows
from outrider.client.bench.acceptance import total

console = Console(highlight=False, soft_wrap=True)
# questions; of a run with few streams, and with many
_FEWEST_QUESTIONS, _MOST_QUESTIONS = 4, 16
# tokens; of an answer that warms a variant up at a new load
_WARM_UP_TOKENS = 24

LlamaServer = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="llama.cpp's llama-server.")]
Xllamacpp = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="A Python that has xllamacpp: llama.cpp's server out of it."),
]
Vllm = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="A Python that has vLLM for CPUs.")]


@dataclass(frozen=True)
class Load:
    temperature: float
    num_streams: int

    def questions(self, round_index: int) -> list[str]:
        """Others in each round, as long as there are some."""
        most = max(_MOST_QUESTIONS, self.num_streams)
        count = min(max(_FEWEST_QUESTIONS, 2 * self.num_streams), most)
        return [QUESTIONS[(round_index * count + place) % len(QUESTIONS)] for place in range(count)]


def main(
    model: Annotated[str, typer.Argument(help="A GGUF file.")],
    head: Annotated[str, typer.Option(help="Draft model or head, also measured; several comma-separated.")] = "",
    lengths: Annotated[str, typer.Option(help="Draft tokens of each method, comma-separated.")] = "5",
    llama_server: LlamaServer = None,
    xllamacpp: Xllamacpp = None,
    vllm: Vllm = None,
    streams: Annotated[str, typer.Option(help="Concurrent streams, comma-separated.")] = "1,4,16",
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated; 0 and 1 if absent.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 96,
    rounds: Annotated[int, typer.Option(help="Repetitions; figures are medians over them.")] = 2,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture here (SVG).")] = None,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/real_chat.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.real_chat SmolLM2-135M-Instruct.Q4_1.gguf --xllamacpp ~/peers/bin/python"""
    counts = [int(part) for part in streams.split(",")]
    loads = [Load(degree, count) for degree in temperature or (0.0, 1.0) for count in counts]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as until:
        folder, slots = Path(scratch), max(counts)
        drafts = [int(part) for part in lengths.split(",")]
        variants = systems.outrider(model, head, drafts, folder, until, _say)
        if llama_server:
            variants += systems.llama_cpp([str(llama_server)], "--llama-server", Path(model), slots, folder, until)
        if xllamacpp:
            program = systems.llama_server_of_package(xllamacpp)
            variants += systems.llama_cpp(program, "--xllamacpp", Path(model), slots, folder, until)
        if vllm:
            variants += systems.vllm(vllm, model, slots, folder, until)
        rows = [row for load in loads for row in _measure(variants, load, max_tokens, rounds)]
    rows = [{"model": Path(model).name, "head": head, "max_tokens": max_tokens, **row} for row in rows]
    for line in report.table(rows):
        console.print(line, markup=False)
    console.print(f"{len(os.sched_getaffinity(0))} cores; the client runs on the same cores as the servers")
    if plot:
        report.draw(rows, plot)
    if save:
        console.print(f"rows appended to {save_rows('real_chat', rows)}")


def _measure(variants: Sequence[Variant], load: Load, max_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """One row per variant. The order alternates back and forth, so a machine that gets slower favours no variant."""
    runs: dict[Variant, list[Run]] = {variant: [] for variant in variants}
    for variant in variants:
        _run(variant, load, load.questions(rounds), min(_WARM_UP_TOKENS, max_tokens), "warm-up")
    for round_index in range(rounds):
        for variant in variants[:: -1 if round_index % 2 else 1]:
            run = _run(variant, load, load.questions(round_index), max_tokens, str(round_index))
            runs[variant].append(run)
            _say(
                f"T={load.temperature:g}, {load.num_streams} streams, round {round_index + 1} of {rounds}: "
                f"{variant.system} {variant.name} {run.tokens_per_s:.1f} tokens/s"
            )
    plain = {variant.system: runs[variant] for variant in variants if variant.name == report.PLAIN}
    return [_row(variant, load, found, plain[variant.system]) for variant, found in runs.items()]


def _run(variant: Variant, load: Load, questions: Sequence[str], max_tokens: int, label: str) -> Run:
    salt = f"{load.temperature:g}-{load.num_streams}-{variant.name}-{label}"
    bodies = [variant.body(question, max_tokens, load.temperature, salt) for question in questions]
    return asyncio.run(send(variant, bodies, load.num_streams))


def _row(variant: Variant, load: Load, runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Raises RuntimeError for an Outrider that says something else with drafts, at temperature 0."""
    results = [result for run in runs for result in run.results]
    same = [result.text == other.text for result, other in zip(results, _results(plain), strict=True)]
    if variant.system == "outrider" and load.temperature == 0.0 and not all(same):
        raise RuntimeError(f"{variant.name}: {same.count(False)} of {len(same)} answers differ from the plain ones")
    accepted = total(run.acceptance for run in runs if run.acceptance)
    return {
        "system": variant.system,
        "variant": variant.name,
        "temperature": load.temperature,
        "num_streams": load.num_streams,
        "tokens_per_s": median(run.tokens_per_s for run in runs),
        "tokens_per_s_quantiles": quantiles([run.tokens_per_s for run in runs]),
        "ttft_s": quantiles([result.first_token_s for result in results]),
        "itl_s": quantiles([gap for result in results for gap in result.gaps_s]),
        "prompt_tokens": fmean(result.num_prompt_tokens or 0 for result in results),
        "answer_tokens": fmean(result.num_output_tokens for result in results),
        "acceptance_length": accepted.length if accepted.num_drafts else None,
        "acceptance_rate": accepted.rate if accepted.num_drafts else None,
        "same_text_as_plain": f"{sum(same)}/{len(same)}" if load.temperature == 0.0 else "",
    }


def _results(runs: Sequence[Run]) -> list[Any]:
    return [result for run in runs for result in run.results]


def _say(message: str) -> None:
    console.print(f"==> {message}", markup=False)


if __name__ == "__main__":
    typer.run(main)
