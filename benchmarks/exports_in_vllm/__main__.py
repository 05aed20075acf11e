"""Runs in vLLM what `outrider train export` writes: `python -m benchmarks.exports_in_vllm --vllm PYTHON`.

Every drafter answers the same greedy prompts in vLLM and here. A head that vLLM reads as we do has about as many of its
drafts accepted there as here; one that it reads otherwise has none. vLLM's answers with a head are compared
with its own without one. Nothing is timed. Rows go to benchmarks/results/exports_in_vllm.jsonl.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.exports_in_vllm.sides import Answers, Run, Task, answers_here, answers_of_vllm
from benchmarks.prompts import mixed_prompts
from benchmarks.records import save_rows
from outrider.drafting.checkpoints.recognise import recognise
from outrider.gateway.request.tokenizer import Tokenizer

console = Console(highlight=False, soft_wrap=True)
_MODELS = Path(__file__).parents[2] / "models"
HEADS = ("demo-eagle", "demo-eagle3", "demo-medusa", "demo-mlp-speculator", "demo-draft")
# tokens; of a prompt
_PROMPT_LEN = 64

Row = dict[str, Any]


@dataclass(frozen=True)
class Drafter:
    """name: in the table. speculation: of both sides."""

    name: str
    target: Path
    speculation: dict[str, Any]


def main(
    vllm: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="A Python that has vLLM.")],
    target: Annotated[Path, typer.Option(help="The heads' target.")] = _MODELS / "demo-target",
    head: Annotated[list[Path] | None, typer.Option(help="Head or draft model; repeatable.")] = None,
    mtp: Annotated[list[Path] | None, typer.Option(help="A target with an MTP layer; repeatable.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1)] = 6,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 96,
    draft_len: Annotated[int, typer.Option(min=1, help="Medusa and MLP speculators: their number of heads.")] = 3,
    dtype: Annotated[str, typer.Option(help="float32: answers differ by what is read, not by rounding.")] = "float32",
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/exports_in_vllm.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.exports_in_vllm --vllm ~/vllm/bin/python"""
    heads = head or [_MODELS / name for name in HEADS]
    drafters = [drafter_of(path, target, draft_len) for path in heads]
    drafters += [Drafter(path.name, path, _speculation("mtp", None, draft_len)) for path in mtp or ()]
    tasks = {
        path: Task(path, token_prompts(path, num_prompts), max_tokens, dtype)
        for path in {drafter.target: None for drafter in drafters}
    }
    runs = [Run(tasks[drafter.target], drafter.speculation) for drafter in drafters]
    with tempfile.TemporaryDirectory() as scratch:
        answers = answers_of_vllm(vllm, [*(Run(task, None) for task in tasks.values()), *runs], Path(scratch))
    plain = dict(zip(tasks, answers, strict=False))
    rows = [
        row(drafter, plain[drafter.target], there, answers_here(run))
        for drafter, there, run in zip(drafters, answers[len(tasks) :], runs, strict=True)
    ]
    for line in table(rows):
        console.print(line, markup=False)
    if save:
        common = {"num_prompts": num_prompts, "max_tokens": max_tokens, "dtype": dtype}
        console.print(f"rows appended to {save_rows('exports_in_vllm', [common | found for found in rows])}")


def drafter_of(path: Path, target: Path, draft_len: int) -> Drafter:
    """A head of `target`, or a draft model. Raises CheckpointRefused."""
    return Drafter(path.name, target, _speculation(recognise(path), path, draft_len))


def _speculation(method: str, model: Path | None, draft_len: int) -> dict[str, Any]:
    named = {"model": str(model)} if model else {}
    return {"method": method, "num_speculative_tokens": draft_len, **named}


def token_prompts(target: Path, count: int) -> list[list[int]]:
    """The first tokens of code, prose and copied text in turn."""
    tokenizer = Tokenizer.load(target)
    return [tokenizer.encode(text)[:_PROMPT_LEN] for text in mixed_prompts(count)]


def row(drafter: Drafter, plain: Answers, there: Answers, here: Answers) -> Row:
    """plain: vLLM's without a drafter."""
    pairs = list(zip(plain.token_ids, there.token_ids, strict=False))
    return {
        "drafter": drafter.name,
        "method": drafter.speculation["method"],
        "draft_len": drafter.speculation["num_speculative_tokens"],
        "vllm": there.version,
        "error": plain.error or there.error,
        "num_drafted_vllm": there.num_drafted,
        "num_accepted_vllm": there.num_accepted,
        "num_drafted": here.num_drafted,
        "num_accepted": here.num_accepted,
        "same_as_plain_vllm": sum(left == right for left, right in pairs),
        "same_as_vllm": sum(left == right for left, right in zip(here.token_ids, plain.token_ids, strict=False)),
        "num_answers": len(here.token_ids),
    }


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of Markdown."""
    yield "| drafter | method | vLLM: accepted of drafted | here | vLLM with = without | here = vLLM |"
    yield "|---|---|---|---|---|---|"
    for found in rows:
        there = _share(found["num_accepted_vllm"], found["num_drafted_vllm"])
        same = [f"{found[key]}/{found['num_answers']}" for key in ("same_as_plain_vllm", "same_as_vllm")]
        if found["error"]:
            there, same[0] = f"`{found['error']}`", ""
        here = _share(found["num_accepted"], found["num_drafted"])
        yield f"| {found['drafter']} | {found['method']} | {there} | {here} | {same[0]} | {same[1]} |"


def _share(num_accepted: int, num_drafted: int) -> str:
    return f"{num_accepted} of {num_drafted} ({num_accepted / num_drafted:.2f})" if num_drafted else "none drafted"


if __name__ == "__main__":
    typer.run(main)
