"""`outrider certify MODEL` (or `python -m outrider.engine.certify MODEL`): is this model row-invariant on this machine?

Exit code 0: it is; 1: it is not; 2: the model is refused. torch is imported late, so that --help is fast.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from outrider.shared.checkpoint.draft_heads import require_model
from outrider.shared.checkpoint.hub import local_checkpoint
from outrider.shared.command_line import run_command
from outrider.shared.errors import ConfigError, OutriderError
from outrider.shared.vllm_keys import KV_CACHE_DTYPES

if TYPE_CHECKING:
    from outrider.engine.certificate import Certificate
    from outrider.engine.model.loaded import LoadedModel

# blocks; unused by the checks, which make caches of their own
_NUM_BLOCKS = 64
_BLOCK_SIZE = 16
_INTERRUPTED = 130


def main(
    model: Annotated[str, typer.Argument(help="Folder of an HF checkpoint.")],
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], typer.Option(help="Of weights and KV cache.")
    ] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model runs.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="0: every core.")] = 0,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Processes that share the model.")] = 1,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, fp8 or int8.")] = "auto",
    packed_arithmetic: Annotated[str, typer.Option(help="Of quantised weights: auto, bf16 or int8.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Prove row invariance on a loaded model, check by check.

    Examples:

      outrider certify models/demo-target --dtype float32

      outrider certify ~/checkpoints/llama --tensor-parallel-size 2 --json
    """
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(f"--kv-cache-dtype: {kv_cache_dtype!r} is not one of {', '.join(KV_CACHE_DTYPES)}")
        require_model(Path(local_checkpoint(model, "MODEL")), "MODEL")
        with errors.status(f"loading and certifying {model}"):
            _import_torch(errors)
            num_threads = threads or len(os.sched_getaffinity(0))
            names = {"kv_cache_dtype": kv_cache_dtype, "packed_arithmetic": packed_arithmetic}
            loaded, certificate = _certified(model, dtype, device, num_threads, tensor_parallel_size, names)
    except OutriderError as error:
        errors.print(f"outrider: {error.message}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if as_json:
        console.print_json(
            json.dumps({"model": model, "tensor_parallel_size": tensor_parallel_size, **asdict(certificate)})
        )
    else:
        _show(console, loaded, certificate)
    raise typer.Exit(0 if certificate.holds else 1)


def _import_torch(console: Console) -> None:
    """Takes seconds, in which an interrupt could surface as another exception or be lost."""

    def leave(_signum: int, _frame: object) -> NoReturn:
        console.show_cursor()
        os._exit(_INTERRUPTED)

    before = signal.signal(signal.SIGINT, leave)
    try:
        importlib.import_module("outrider.engine.tensor_parallel.leader")
    finally:
        signal.signal(signal.SIGINT, before)


def _certified(
    model: str, dtype: str, device: str, num_threads: int, tensor_parallel_size: int, names: dict[str, str]
) -> tuple[LoadedModel, Certificate]:
    from outrider.engine.certificate import certify
    from outrider.engine.run.runner import ModelRunner
    from outrider.engine.tensor_parallel.leader import load_sharded
    from outrider.engine.tensor_parallel.protocol import LoadSpec

    spec = LoadSpec(model, dtype, device, "auto", None, num_threads, **names)
    loaded = load_sharded(spec, tensor_parallel_size)
    try:
        runner = ModelRunner(loaded, loaded.make_cache(_NUM_BLOCKS, _BLOCK_SIZE))
        return loaded, certify(loaded, runner)
    finally:
        loaded.close()


def _show(console: Console, loaded: LoadedModel, certificate: Certificate) -> None:
    dtype = str(loaded.dtype).removeprefix("torch.")
    if loaded.kv_code_dtype is not None:
        dtype += f", KV cache in {loaded.kv_cache_name}"
    table = Table(title=f"{loaded.architecture}, {dtype}, {loaded.device}, {loaded.attention_ops.backend} attention")
    table.add_column("the same rows, computed")
    table.add_column("bits equal to the plain way")
    for check in certificate.checks:
        table.add_row(check.name, "yes" if check.holds else "NO")
    console.print(table)
    console.print(certificate.describe())


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    run_command(app, "outrider certify")
