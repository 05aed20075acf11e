"""The `outrider train` commands. What needs torch, httpx or matplotlib is imported by the command that uses it.

Not here: the work (prepare_data, train, export_run, evaluate_heads). Run: `outrider train --help`.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from training.cli_errors import clear_errors
from training.cli_output import Json, print_result, progress_console
from training.cli_train import TargetName, train

app = typer.Typer(
    help="Make draft heads for a target: ask it for text, train, export, measure.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

BaseUrl = Annotated[str, typer.Option(help="The server's OpenAI API, up to and with /v1.", envvar="OPENAI_BASE_URL")]
ApiKey = Annotated[str, typer.Option(help="Sent as a bearer token.", envvar="OPENAI_API_KEY", show_default=False)]
ModelName = Annotated[str, typer.Option(help="Model to ask for; empty: the first that the server lists.")]
Prompts = Annotated[Path | None, typer.Option(help="Text (a prompt a line) or JSONL; none: the built-in corpus.")]
Corpus = Annotated[Path, typer.Option(help="Folder of the built-in corpus; made anew where there is none.")]


@app.command("prepare-data")
def prepare_data(
    output: Annotated[Path, typer.Option(help="JSONL to write, or to go on with.")],
    prompts: Prompts = None,
    base_url: BaseUrl = "http://127.0.0.1:8000/v1",
    model: ModelName = "",
    api_key: ApiKey = "",
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated. [default: 0 and 1]")] = None,
    samples: Annotated[int, typer.Option(help="Completions per prompt and temperature above 0.")] = 1,
    max_tokens: int = 256,
    concurrency: Annotated[int, typer.Option(help="Requests at once.")] = 8,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    num_prompts: Annotated[int, typer.Option(min=1, help="Of the built-in corpus.")] = 1000,
    max_retries: Annotated[int, typer.Option(min=0)] = 6,
    corpus: Corpus = Path(".run/training"),
    as_json: Json = False,
) -> None:
    """Let a running server complete prompts, into JSONL for `train`. The same command again goes on where it stopped.

    Examples:

      outrider train prepare-data --prompts questions.jsonl --output data.jsonl

      outrider train prepare-data --base-url https://host/v1 --model llama --temperature 0.7 --output data.jsonl
    """
    with clear_errors():
        from training.prepare_data import PrepareConfig, prepare
        from training.progress import Progress
        from training.prompts import corpus_prompts, read_prompts

        config = PrepareConfig(
            base_url=base_url,
            model=model,
            output=output,
            api_key=api_key,
            temperatures=tuple(temperature or (0.0, 1.0)),
            num_samples=samples,
            max_tokens=max_tokens,
            concurrency=concurrency,
            seed=seed,
            max_retries=max_retries,
        )
        config.check()
        wanted = read_prompts(prompts) if prompts is not None else corpus_prompts(corpus, "train", num_prompts, seed)
        console = progress_console(as_json=as_json)
        result = asyncio.run(prepare(wanted, config, Progress(console, "completions")))
        for problem in result.problems:
            console.print(f"refused: {problem}", style="yellow", markup=False, soft_wrap=True)
        counts = f"{result.num_written} written, {result.num_skipped} were there, {result.num_refused} refused"
        print_result(f"{output}: {counts}", {"output": str(output), **asdict(result)}, as_json=as_json)
        if result.num_refused:
            raise typer.Exit(1)


app.command()(train)


@app.command()
def export(
    run: Annotated[Path, typer.Option(help="Folder of a training run.")],
    target: Annotated[Path, typer.Option(help="Folder of the target's checkpoint.")],
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    target_name: TargetName = "",
    as_json: Json = False,
) -> None:
    """Write a run's latest checkpoint in the public layout of its method.

    Example: outrider train export --run .run/eagle3 --target models/demo-target --output models/my-eagle3
    """
    with clear_errors():
        from training.export_run import export_run
        from training.train import export_dtype

        step = export_run(run, target, output, export_dtype(dtype), target_name or str(target))
        print_result(f"{output}: the head of step {step}", {"output": str(output), "step": step}, as_json=as_json)


@app.command()
def evaluate(
    base_url: BaseUrl = "http://127.0.0.1:8000/v1",
    model: ModelName = "",
    api_key: ApiKey = "",
    method: Annotated[list[str] | None, typer.Option(help="May be repeated. [default: draft_model, ngram]")] = None,
    draft_len: Annotated[list[int] | None, typer.Option(help="May be repeated. [default: 1, 3, 5]")] = None,
    tree: Annotated[list[int] | None, typer.Option(help="Also token trees of so many nodes; may be repeated.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated. [default: 0, 1]")] = None,
    domain: Annotated[list[str] | None, typer.Option(help="code, prose, chat, or name=prompts.jsonl.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts per domain.")] = 16,
    max_tokens: int = 128,
    concurrency: int = 4,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    output: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
    plot: Annotated[Path | None, typer.Option(help="SVG file for the plot.")] = None,
    corpus: Corpus = Path(".run/training"),
    as_json: Json = False,
) -> None:
    """Measure mean acceptance lengths through a running gateway, on held-out prompts.

    Example: outrider train evaluate --method eagle3 --method draft_model --output acceptance.json --plot acceptance.svg
    """
    with clear_errors():
        from training.evaluate_heads import EvaluateConfig, evaluate_through_gateway, show
        from training.progress import Progress

        config = EvaluateConfig(
            base_url=base_url,
            model=model,
            api_key=api_key,
            methods=tuple(method or ("draft_model", "ngram")),
            draft_lens=tuple(draft_len or (1, 3, 5)),
            tree_nodes=tuple(tree or ()),
            temperatures=tuple(temperature or (0.0, 1.0)),
            domains=tuple(domain or ("code", "prose", "chat")),
            num_prompts=num_prompts,
            max_tokens=max_tokens,
            concurrency=concurrency,
            seed=seed,
            corpus=corpus,
        )
        console = progress_console(as_json=as_json)
        figures = asyncio.run(evaluate_through_gateway(config, Progress(console, "requests")))
        if as_json:
            print_result("", figures.as_dict(), as_json=True)
        else:
            show(figures, console)
        if output is not None:
            figures.write_json(output)
        if plot is not None:
            from training.acceptance_plot import write_plot

            write_plot(figures, plot)


if __name__ == "__main__":
    app()
