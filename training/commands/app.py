"""The `outrider train` commands. Each imports torch, httpx or matplotlib only if it needs them.

Not here: the work (prepare_data.py, train.py, export_run.py, evaluate_heads.py). Run: `outrider train --help`.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from outrider.shared.command_line import from_arguments
from outrider.training.commands.auto import auto
from outrider.training.commands.errors import clear_errors
from outrider.training.commands.output import Json, print_result, progress_console
from outrider.training.commands.train import Target, TargetName, train

app = typer.Typer(
    help="Make draft heads for a target: collect its text, train, export, evaluate.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

BaseUrl = Annotated[str, typer.Option(help="The server's OpenAI API, including /v1.", envvar="OPENAI_BASE_URL")]
ApiKey = Annotated[str, typer.Option(help="Sent as a bearer token.", envvar="OPENAI_API_KEY", show_default=False)]
ModelName = Annotated[str, typer.Option(help="Model name; empty: the first that the server lists.")]
Prompts = Annotated[
    str,
    typer.Option(
        help="Text (one prompt per line) or JSONL: a file, or ORG/NAME:FILE of a data set of the Hugging Face Hub; "
        "empty: the built-in corpus."
    ),
]
Corpus = Annotated[Path, typer.Option(help="Folder of the built-in corpus; created if missing.")]


@app.command("prepare-data")
def prepare_data(
    output: Annotated[Path, typer.Option(help="JSONL file to write or continue.")],
    prompts: Prompts = "",
    base_url: BaseUrl = "http://127.0.0.1:8000/v1",
    model: ModelName = "",
    api_key: ApiKey = "",
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated. [default: 0 and 1]")] = None,
    samples: Annotated[int, typer.Option(help="Completions per prompt and temperature above 0.")] = 1,
    max_tokens: int = 256,
    concurrency: Annotated[int, typer.Option(help="Concurrent requests.")] = 8,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    sample_prompts: Annotated[
        bool, typer.Option(help="Have a chat model write the user turns too, into OUTPUT's .turns.jsonl.")
    ] = False,
    num_prompts: Annotated[int, typer.Option(min=1, help="From the built-in corpus, or sampled.")] = 1000,
    max_retries: Annotated[int, typer.Option(min=0)] = 6,
    corpus: Corpus = Path(".run/training"),
    as_json: Json = False,
) -> None:
    """Have a running server complete prompts, into JSONL for `train`. Repeat the command to continue where it stopped.

    Examples:

      outrider train prepare-data --prompts questions.jsonl --output data.jsonl

      outrider train prepare-data --sample-prompts --output data.jsonl

      outrider train prepare-data --base-url https://host/v1 --model llama --temperature 0.7 --output data.jsonl
    """
    with clear_errors():
        from outrider.shared.checkpoint.hub import local_data_file
        from outrider.training.data.prepare_data import PrepareConfig, prepare
        from outrider.training.data.prompts import corpus_prompts, read_prompts
        from outrider.training.data.sampled_prompts import sampled_prompts
        from outrider.training.errors import SettingError
        from outrider.training.progress import Progress

        temperatures = tuple(temperature or (0.0, 1.0))
        config = from_arguments(PrepareConfig, locals(), num_samples=samples)
        config.check()
        if sample_prompts and prompts:
            raise SettingError("--sample-prompts makes the prompts that --prompts names; give one of them")
        console = progress_console(as_json=as_json)
        if sample_prompts:
            wanted = asyncio.run(sampled_prompts(config, num_prompts, Progress(console, "user turns")))
        elif prompts:
            wanted = read_prompts(local_data_file(prompts, "--prompts"))
        else:
            wanted = corpus_prompts(corpus, "train", num_prompts, seed)
        result = asyncio.run(prepare(wanted, config, Progress(console, "completions")))
        for problem in result.problems:
            console.print(f"refused: {problem}", style="yellow", markup=False, soft_wrap=True)
        counts = f"{result.num_written} written, {result.num_skipped} already present, {result.num_refused} refused"
        print_result(f"{output}: {counts}", {"output": str(output), **asdict(result)}, as_json=as_json)
        if result.num_refused:
            raise typer.Exit(1)


app.command("auto")(auto)
app.command()(train)


@app.command()
def export(
    run: Annotated[Path, typer.Option(help="Folder of a training run.")],
    target: Target,
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    target_name: TargetName = "",
    as_json: Json = False,
) -> None:
    """Write a run's latest checkpoint in the public layout of its method.

    Example: outrider train export --run .run/eagle3 --target models/demo-target --output models/my-eagle3
    """
    with clear_errors():
        from outrider.shared.checkpoint.draft_heads import require_model
        from outrider.shared.checkpoint.hub import local_checkpoint
        from outrider.training.errors import SettingError
        from outrider.training.run_config import check_export_dtype

        check_export_dtype(dtype)
        require_model(Path(local_checkpoint(target, "--target")), "--target")
        if not run.is_dir():
            raise SettingError(f"--run {run}: there is no such folder")
        from outrider.engine.model.local_model import local_model  # now: torch takes seconds to import
        from outrider.training.export_run import export_run
        from outrider.training.train import torch_dtype

        folder = Path(local_model(target, "--target"))
        step = export_run(run, folder, output, torch_dtype(dtype), target_name or target)
        print_result(f"{output}: the head of step {step}", {"output": str(output), "step": step}, as_json=as_json)


@app.command()
def evaluate(
    base_url: BaseUrl = "http://127.0.0.1:8000/v1",
    model: ModelName = "",
    api_key: ApiKey = "",
    method: Annotated[list[str] | None, typer.Option(help="May be repeated. [default: draft_model, ngram]")] = None,
    draft_len: Annotated[list[int] | None, typer.Option(help="May be repeated. [default: 1, 3, 5]")] = None,
    tree: Annotated[
        list[int] | None, typer.Option(help="Also token trees with this many nodes; may be repeated.")
    ] = None,
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
        from outrider.training.evaluate_heads import EvaluateConfig, evaluate_through_gateway, show
        from outrider.training.progress import Progress

        config = from_arguments(
            EvaluateConfig,
            locals(),
            methods=tuple(method or ("draft_model", "ngram")),
            draft_lens=tuple(draft_len or (1, 3, 5)),
            tree_nodes=tuple(tree or ()),
            temperatures=tuple(temperature or (0.0, 1.0)),
            domains=tuple(domain or ("code", "prose", "chat")),
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
            from outrider.training.acceptance_plot import write_plot

            write_plot(figures, plot)


if __name__ == "__main__":
    app()
