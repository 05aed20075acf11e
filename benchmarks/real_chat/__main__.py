"""Chat on real weights, with peers: `python -m benchmarks.real_chat FILE.gguf`.

One run on one machine, all systems in turn, peers held still while another answers: this one plain, with every method
that it serves and with `auto`; llama.cpp's server on the same file; vLLM's CPU build on the same weights, dequantised.
The prompts are in no data set, answers end where the model ends them, and no run sees answers or prefixes of another.
Figures are medians over rounds, each with other questions. Rows go to benchmarks/results/real_chat.jsonl.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
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
from benchmarks.real_chat.questions import PROMPTS, after_text
from benchmarks.real_chat.systems import SHORT_CONTEXT, Limits
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
Vllm = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="A Python that has vLLM for CPUs; with --head drafts with it too."),
]
LlamaHead = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="An EAGLE-3 head as llama.cpp reads it, measured there."),
]


@dataclass(frozen=True)
class Load:
    """prompts: a name in PROMPTS. num_questions: in a round; 0: by the number of streams."""

    prompts: str
    temperature: float
    num_streams: int
    num_context_tokens: int = 0
    num_questions: int = 0

    def questions(self, round_index: int) -> list[str]:
        """Others in each round, as long as there are some."""
        most = max(_MOST_QUESTIONS, self.num_streams)
        count = self.num_questions or min(max(_FEWEST_QUESTIONS, 2 * self.num_streams), most)
        texts = PROMPTS[self.prompts]
        places = range(round_index * count, (round_index + 1) * count)
        return [after_text(texts[place % len(texts)], self.num_context_tokens, place) for place in places]


def main(
    model: Annotated[str, typer.Argument(help="A GGUF file.")],
    head: Annotated[str, typer.Option(help="Draft model or head, also measured; several comma-separated.")] = "",
    lengths: Annotated[str, typer.Option(help="Draft tokens of each method, comma-separated.")] = "5",
    methods: Annotated[
        str,
        typer.Option(help="Of those served, comma-separated; empty: all, and auto; off: no drafts, by peers neither."),
    ] = "",
    llama_server: LlamaServer = None,
    xllamacpp: Xllamacpp = None,
    llama_head: LlamaHead = None,
    vllm: Vllm = None,
    streams: Annotated[str, typer.Option(help="Concurrent streams, comma-separated.")] = "1,4,16",
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated; 0 and 1 if absent.")] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="questions or edits (of a given text); may be repeated; questions if absent."),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of text before each question, about.", min=0)] = 0,
    questions: Annotated[int, typer.Option(help="A round; 0: two a stream, 4 to 16.", min=0)] = 0,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 96,
    rounds: Annotated[int, typer.Option(help="Repetitions; figures are medians over them, ratios too.")] = 2,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture here (SVG).")] = None,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/real_chat.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.real_chat SmolLM2-135M-Instruct.Q4_1.gguf --xllamacpp ~/peers/bin/python"""
    counts = [int(part) for part in streams.split(",")]
    kinds = prompts or ["questions"]
    if unknown := sorted({*kinds} - {*PROMPTS}):
        raise typer.BadParameter(f"{', '.join(unknown)}: must be one of {', '.join(PROMPTS)}", param_hint="--prompts")
    degrees = temperature or (0.0, 1.0)
    loads = [Load(kind, degree, count, context, questions) for kind in kinds for degree in degrees for count in counts]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as until:
        folder = Path(scratch)
        context_len = min(systems.context_of(model), round(SHORT_CONTEXT + 1.5 * context))
        limits = Limits(max(counts), context_len, drafts=methods != "off")
        drafts = [int(part) for part in lengths.split(",")]
        names = [name for name in methods.split(",") if name]
        variants = systems.outrider(model, head, names, drafts, folder, until, _say)
        programs = {"--llama-server": [str(llama_server)]} if llama_server else {}
        if xllamacpp:
            programs["--xllamacpp"] = systems.llama_server_of_package(xllamacpp)
        for option, program in programs.items():
            variants += systems.llama_cpp(program, option, Path(model), llama_head, limits, folder, until)
        if vllm:
            variants += systems.vllm(vllm, model, head, drafts[0], limits, folder, until)
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

    def run_alone(variant: Variant, questions: Sequence[str], most_tokens: int, label: str) -> Run:
        with ExitStack() as others:
            for process in {other.process for other in variants if other.process not in (None, variant.process)}:
                others.enter_context(process.paused())
            return _run(variant, load, questions, most_tokens, label)

    for variant in variants:
        run_alone(variant, load.questions(rounds), min(_WARM_UP_TOKENS, max_tokens), "warm-up")
    for round_index in range(rounds):
        for variant in variants[:: -1 if round_index % 2 else 1]:
            run = run_alone(variant, load.questions(round_index), max_tokens, str(round_index))
            runs[variant].append(run)
            _say(
                f"{load.prompts}, T={load.temperature:g}, {load.num_streams} streams, "
                f"round {round_index + 1} of {rounds}: {variant.system} {variant.name} {run.tokens_per_s:.1f} tokens/s"
            )
    plain = {variant.system: runs[variant] for variant in variants if variant.name == report.PLAIN}
    return [_row(variant, load, found, plain[variant.system]) for variant, found in runs.items()]


def _run(variant: Variant, load: Load, questions: Sequence[str], max_tokens: int, label: str) -> Run:
    salt = f"{load.prompts}-{load.temperature:g}-{load.num_streams}-{variant.name}-{label}"
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
        "prompts": load.prompts,
        "temperature": load.temperature,
        "num_streams": load.num_streams,
        "context": load.num_context_tokens,
        "tokens_per_s": median(run.tokens_per_s for run in runs),
        # Both sides of a ratio ask the same questions in the same minute: a machine's drift is in neither.
        "of_plain": median(run.tokens_per_s / other.tokens_per_s for run, other in zip(runs, plain, strict=True)),
        "tokens_per_s_quantiles": quantiles([run.tokens_per_s for run in runs]),
        "ttft_s": quantiles([result.first_token_s for result in results]),
        "decode_tokens_per_s": _decode_rate(results),
        "itl_s": quantiles([gap for result in results for gap in result.gaps_s]),
        "prompt_tokens": fmean(result.num_prompt_tokens or 0 for result in results),
        "answer_tokens": fmean(result.num_output_tokens for result in results),
        "acceptance_length": accepted.length if accepted.num_drafts else None,
        "acceptance_rate": accepted.rate if accepted.num_drafts else None,
        "same_text_as_plain": f"{sum(same)}/{len(same)}" if load.temperature == 0.0 else "",
    }


def _decode_rate(results: Sequence[Any]) -> float:
    """Returns the median of the answers' tokens a second after their first one; 0: no answer has a second."""
    rates = [(result.num_output_tokens - 1) / sum(result.gaps_s) for result in results if sum(result.gaps_s)]
    return median(rates) if rates else 0.0


def _results(runs: Sequence[Run]) -> list[Any]:
    return [result for run in runs for result in run.results]


def _say(message: str) -> None:
    console.print(f"==> {message}", markup=False)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # peers, which may be paused, end with it
    typer.run(main)
