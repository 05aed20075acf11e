"""`outrider bench`: load on any OpenAI-compatible server, with the figures of vLLM's `bench serve`."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outrider.client.bench.dataset import read_prompts
from outrider.client.bench.figures import METRICS, figures
from outrider.client.bench.report import error_lines, report_lines
from outrider.client.bench.request import RequestResult
from outrider.client.bench.run import BenchRun, BenchSettings, run_bench
from outrider.client.cli.bench_options import VLLM_BENCH
from outrider.client.cli.common import (
    BASE_URL_VARIABLE,
    DEFAULT_RUN_DIR,
    Json,
    RunDir,
    clear_errors,
    console,
    errors,
    print_json,
    running_stack,
    say_aside,
)
from outrider.client.cli.foreign_options import ForeignCommand, ignored_line, ignored_options
from outrider.client.rest import rest_client, served_model
from outrider.shared.command_line import from_arguments
from outrider.shared.errors import ConfigError

BaseUrl = Annotated[
    str,
    typer.Option(envvar=BASE_URL_VARIABLE, help="The server, with or without /v1; empty: the running stack."),
]
ServerHost = Annotated[str, typer.Option(help="The server's host, instead of --base-url.")]
ServerPort = Annotated[int, typer.Option(help="The server's port, instead of --base-url.")]
Model = Annotated[str, typer.Option(help="Model name in the requests; empty: the first of the server's /v1/models.")]
ServedName = Annotated[str, typer.Option(help="Counts before --model, which with vLLM names a tokenizer.")]
Endpoint = Annotated[str, typer.Option(help="/v1/completions or /v1/chat/completions.")]
RequestRate = Annotated[float, typer.Option(min=1e-6, help="Requests per second (Poisson); inf: all at once.")]
MaxConcurrency = Annotated[int, typer.Option(min=0, help="Concurrent requests; 0: unlimited.")]
InputLen = Annotated[int, typer.Option(min=1, help="Approximate tokens of a random prompt, by the server's count.")]
OutputLen = Annotated[int, typer.Option(min=1, help="max_tokens, unless the dataset sets it.")]
DatasetPath = Annotated[
    Path | None, typer.Option(help='JSON lines: {"prompt": ...} or {"messages": [...]}, and "max_tokens".')
]
Seed = Annotated[int, typer.Option(help="Seed of prompts and arrivals; not sent to the server.")]
ApiKey = Annotated[str, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token.")]
Method = Annotated[str, typer.Option(help="Outrider only: auto, off or a draft method; empty: not sent.")]
NumSpeculativeTokens = Annotated[int, typer.Option(min=0, help="Outrider only: draft tokens per round; 0: not sent.")]
PercentileMetrics = Annotated[str, typer.Option(help=f"Metrics to show, of {','.join(METRICS)}.")]
MetricPercentiles = Annotated[str, typer.Option(help="Percentiles, comma-separated.")]
SaveResult = Annotated[bool, typer.Option("--save-result", help="Write the figures to a JSON file.")]
ResultFilename = Annotated[Path | None, typer.Option(help="Result file; default: named by model, rate and time.")]


class BenchCommand(ForeignCommand):
    """Takes the lines of `vllm bench serve`."""

    tables = (VLLM_BENCH,)


def bench(
    context: typer.Context,
    base_url: BaseUrl = "",
    host: ServerHost = "",
    port: ServerPort = 0,
    model: Model = "",
    served_model_name: ServedName = "",
    endpoint: Endpoint = "/v1/completions",
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 100,
    request_rate: RequestRate = float("inf"),
    max_concurrency: MaxConcurrency = 0,
    random_input_len: InputLen = 128,
    random_output_len: OutputLen = 64,
    dataset_path: DatasetPath = None,
    seed: Seed = 0,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Sent if set; vLLM and Outrider accept it.")] = False,
    api_key: ApiKey = "",
    method: Method = "",
    num_speculative_tokens: NumSpeculativeTokens = 0,
    percentile_metrics: PercentileMetrics = "ttft,tpot,itl",
    metric_percentiles: MetricPercentiles = "99",
    save_result: SaveResult = False,
    result_filename: ResultFilename = None,
    run_dir: RunDir = DEFAULT_RUN_DIR,
    as_json: Json = False,
) -> None:
    """Measure an OpenAI-compatible server under load: TTFT, TPOT, ITL, throughput, acceptance.

    Exit code 1 when a request failed.

    Examples:

      outrider bench --num-prompts 32 --max-concurrency 4 --method off

      outrider bench --base-url http://vllm.example:8000 --request-rate 4

      outrider bench --endpoint /v1/chat/completions --dataset-path chats.jsonl

      outrider bench --metric-percentiles 50,90,99 --save-result
    """
    with clear_errors():
        metrics, percentiles = _metrics(percentile_metrics), _percentiles(metric_percentiles)
        if line := ignored_line(ignored_options(context)):
            say_aside(line)
        model = served_model_name or model
        if host or port:
            base_url = f"http://{host or '127.0.0.1'}:{port or 8000}"
        base_url = base_url or running_stack(run_dir, "--base-url").url
        settings = from_arguments(BenchSettings, locals())
        if dataset_path is not None:  # before the server is asked for anything
            read_prompts(dataset_path, settings.is_chat)
        if not model:
            with rest_client(settings.base_url, api_key) as client:
                settings = replace(settings, model=served_model(client))
        found = {**_described(settings), **figures(_run(settings), percentiles)}
        _show(found, metrics, percentiles, as_json=as_json)
        if save_result or result_filename:
            _save(found, result_filename or Path(_filename(found)))
    raise typer.Exit(1 if found["failed"] else 0)


def _run(settings: BenchSettings) -> BenchRun:
    # Create the loop before anything is shown: Ctrl-C during its creation would leave a half-made loop that warns.
    with asyncio.Runner() as runner:
        runner.get_loop()
        return _run_with_progress(runner, settings)


def _run_with_progress(runner: asyncio.Runner, settings: BenchSettings) -> BenchRun:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=errors, disable=not errors.is_terminal) as progress:
        task = progress.add_task("requests", total=settings.num_prompts, note="")
        num_failed = 0

        def on_done(result: RequestResult) -> None:
            nonlocal num_failed
            num_failed += bool(result.error)
            progress.update(task, advance=1, note=f"[red]{num_failed} failed[/red]" if num_failed else "")

        return runner.run(run_bench(settings, on_done))


def _show(found: dict[str, Any], metrics: list[str], percentiles: list[float], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        for line in report_lines(found, metrics, percentiles):
            console.print(line, markup=False, soft_wrap=True)
    for line in error_lines(found):
        errors.print(f"outrider: {line}", style="red", markup=False, soft_wrap=True)


def _described(settings: BenchSettings) -> dict[str, Any]:
    """The settings for the result file, without the API key."""
    described = {name: value for name, value in asdict(settings).items() if name not in ("api_key", "model")}
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        **described,
        "model_id": settings.model,
        "dataset_path": str(settings.dataset_path or ""),
        # JSON has no infinity.
        "request_rate": "inf" if settings.request_rate == float("inf") else settings.request_rate,
    }


def _save(found: dict[str, Any], path: Path) -> None:
    try:
        path.write_text(json.dumps(found, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--result-filename {path}: {error.strerror}") from None
    print(f"figures in {path}", file=sys.stderr)


def _filename(found: dict[str, Any]) -> str:
    concurrency = f"-concurrency{found['max_concurrency']}" if found["max_concurrency"] else ""
    return f"outrider-{found['request_rate']}qps{concurrency}-{Path(found['model_id']).name}-{found['date']}.json"


def _metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ConfigError(f"--percentile-metrics: {unknown[0]} is not one of {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        percentiles = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        percentiles = [-1.0]
    if not all(0 <= percent <= 100 for percent in percentiles):
        raise ConfigError(f"--metric-percentiles: {text!r} is not a list of numbers from 0 to 100")
    return percentiles
