"""The `outrider` command. Exit codes: 0 done, 1 failed, 2 wrong usage or setting."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from client.display import LEGEND, show_stream, summary
from client.generate import Access, CompletionRequest, stream_completion
from client.keys_cli import keys_app
from client.stack import Stack, StackSettings, StackState, read_state, stop_running
from shared.errors import ConfigError, InvalidRequest, OutriderError
from shared.tls import client_tls
from shared.version import outrider_version

# No line break at the end: the tokenizer keeps it together with the indent that follows.
DEMO_PROMPT = '''def read_lines(path):
    """Return the lines of a text file as a list."""'''

app = typer.Typer(
    help="Lossless speculative decoding for LLM serving.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(keys_app, name="key")
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

Model = Annotated[str, typer.Option(help="Folder of the target's HF checkpoint.")]
DraftModel = Annotated[
    str, typer.Option(help="Folders of draft models and trained heads, comma-separated; empty: n-gram only.")
]
Port = Annotated[int, typer.Option(help="REST port.", envvar="OUTRIDER_PORT")]
GrpcPort = Annotated[int, typer.Option(help="gRPC port for clients.", envvar="OUTRIDER_GRPC_PORT")]
Host = Annotated[str, typer.Option(help="Address of the REST and gRPC doors.")]
RedisUrl = Annotated[str, typer.Option(help="Redis to use; empty: start one.", envvar="OUTRIDER_REDIS_URL")]
RunDir = Annotated[Path, typer.Option(help="Folder for logs and state.", envvar="OUTRIDER_RUN_DIR")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16 or float32.")]
Drafters = Annotated[int, typer.Option(min=1, max=64, help="Drafter processes.")]
_SPEC_HELP = """vLLM's JSON, e.g. '{"method": "ngram", "num_speculative_tokens": 4}'."""
SpecConfig = Annotated[str, typer.Option("--speculative-config", "-sc", help=_SPEC_HELP)]
_DEFAULT_RUN_DIR = Path(".run")


def _settings(
    model: str,
    draft_model: str,
    host: str,
    port: int,
    grpc_port: int,
    redis_url: str,
    dtype: str,
    drafters: int,
    speculative_config: str,
) -> StackSettings:
    folders = [("--model", model), *(("--draft-model", folder) for folder in draft_model.split(","))]
    for name, folder in folders:
        if folder and not (Path(folder) / "config.json").is_file():
            raise ConfigError(f"{name}: {folder} is not a checkpoint folder (no config.json)")
    return StackSettings(
        model=model,
        draft_model=draft_model,
        host=host,
        port=port,
        grpc_port=grpc_port,
        redis_url=redis_url,
        num_drafters=drafters,
        dtype=dtype,
        speculative_config=speculative_config,
    )


@app.command()
def up(
    model: Model = "models/demo-target",
    draft_model: DraftModel = "models/demo-draft",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    grpc_port: GrpcPort = 8001,
    redis_url: RedisUrl = "",
    dtype: Dtype = "auto",
    drafters: Drafters = 1,
    speculative_config: SpecConfig = "",
    run_dir: RunDir = _DEFAULT_RUN_DIR,
    detach: Annotated[bool, typer.Option(help="Return when the stack is ready.")] = False,
) -> None:
    """Start Redis, a verifier, drafters and the gateway on this machine.

    Examples:

      outrider up

      outrider up --model ~/checkpoints/llama --draft-model ~/checkpoints/llama-small --port 9000

      outrider up --detach && outrider complete "def main():" && outrider down
    """
    with _clear_errors():
        settings = _settings(model, draft_model, host, port, grpc_port, redis_url, dtype, drafters, speculative_config)
        signal.signal(signal.SIGTERM, _raise_interrupt)  # the children are in sessions of their own
        stack = Stack(settings, run_dir, _say)
        state = stack.start()
        _show_running(state)
        if not detach:
            _run_until_interrupt(stack)


@app.command()
def down(run_dir: RunDir = _DEFAULT_RUN_DIR) -> None:
    """Stop the stack that `outrider up` started from this folder."""
    with _clear_errors():
        if not stop_running(run_dir, _say):
            console.print("no stack is running")


@app.command()
def status(
    run_dir: RunDir = _DEFAULT_RUN_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Show what runs; exit code 1 when nothing does."""
    state = read_state(run_dir)
    if state is None:
        console.print("{}" if as_json else "no stack is running")
        raise typer.Exit(1)
    if as_json:
        console.print_json(json.dumps(asdict(state)))
    else:
        _show_running(state)


@app.command()
def complete(
    prompt: Annotated[str, typer.Argument(help="Text to go on from.")],
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    method: Annotated[str, typer.Option(help="auto, off, draft_model, ngram.")] = "auto",
    num_speculative_tokens: Annotated[int, typer.Option(min=0, help="0: the server's default.")] = 0,
    address: Annotated[str, typer.Option(help="Gateway's gRPC address; empty: the running stack's.")] = "",
    api_key: Annotated[str, typer.Option(envvar="OUTRIDER_API_KEY", help="Of a gateway that asks for keys.")] = "",
    tls_ca_file: Annotated[str, typer.Option(help="TLS, with the gateway checked against this authority.")] = "",
    tls_cert_file: Annotated[str, typer.Option(help="Certificate to present, with --tls-key-file.")] = "",
    tls_key_file: Annotated[str, typer.Option(help="Its private key.")] = "",
    run_dir: RunDir = _DEFAULT_RUN_DIR,
) -> None:
    """Stream a completion, draft tokens marked.

    Examples:

      outrider complete "import os" --method ngram --max-tokens 64

      outrider complete "import os" --address llm.example:8001 --tls-ca-file ca.pem --api-key "$KEY"
    """
    with _clear_errors():
        if not address:
            state = read_state(run_dir)
            if state is None:
                raise ConfigError("no stack is running here; start one with `outrider up` or give --address")
            address = state.grpc_address
        request = CompletionRequest(prompt, max_tokens, temperature, seed, method, num_speculative_tokens)
        access = Access(api_key, client_tls(tls_cert_file, tls_key_file, tls_ca_file, setting="tls"))
        console.print(LEGEND)
        figures = show_stream(console, stream_completion(address, request, access), time.perf_counter)
        console.print(summary(figures))


@app.command()
def demo(
    once: Annotated[bool, typer.Option(help="Exit after the completion.")] = False,
    port: Port = 8000,
    grpc_port: GrpcPort = 8001,
    redis_url: RedisUrl = "",
    run_dir: RunDir = _DEFAULT_RUN_DIR,
) -> None:
    """Start the demo stack, stream a completion with draft tokens marked, stay up until Ctrl-C."""
    with _clear_errors():
        settings = _settings(
            "models/demo-target", "models/demo-draft", "127.0.0.1", port, grpc_port, redis_url, "auto", 1, ""
        )
        signal.signal(signal.SIGTERM, _raise_interrupt)  # the children are in sessions of their own
        stack = Stack(settings, run_dir, _say)
        state = stack.start()
        try:
            console.print()
            console.print(LEGEND)
            console.print()
            console.print(DEMO_PROMPT, style="bold", end="")
            # Sampled, with a seed: greedy text of a model this small soon goes in circles.
            request = CompletionRequest(
                DEMO_PROMPT, 160, temperature=0.7, seed=3, method="draft_model", num_speculative_tokens=5
            )
            figures = show_stream(console, stream_completion(state.grpc_address, request), time.perf_counter)
            console.print()
            console.print(summary(figures))
            _show_running(state)
            if once:
                stack.stop()
        except BaseException:
            stack.stop()
            raise
        if not once:
            _run_until_interrupt(stack)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def certify(context: typer.Context) -> None:
    """Prove on a model that exact mode holds on this machine; `outrider certify --help` lists the options."""
    command = [sys.executable, "-m", "engine.certify", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def train(context: typer.Context) -> None:
    """Make draft heads: prepare-data, train, export, evaluate; `outrider train --help` lists the options."""
    # This process becomes the trainer: Ctrl-C reaches it alone, and the client never loads torch.
    os.execv(sys.executable, [sys.executable, "-m", "training", *context.args])


@app.command()
def version() -> None:
    """Print the version."""
    console.print(outrider_version())


def _run_until_interrupt(stack: Stack) -> None:
    console.print("Ctrl-C stops the stack")
    try:
        dead = stack.wait()
    except KeyboardInterrupt:
        console.print()
        stack.stop()
        return
    tail = stack.log_tail(dead)
    stack.stop()
    raise OutriderError(f"{dead} died; its last words:\n{tail}")


def _raise_interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _show_running(state: StackState) -> None:
    console.print(f"REST   {state.url}/v1  (OpenAI API; {state.url}/ready, {state.url}/metrics)")
    console.print(f"gRPC   {state.grpc_address}  (outrider.v1.Gateway)")
    console.print(f"fleet  {len(state.verifiers)} verifier, {len(state.drafters)} drafter, {state.redis_url}")


def _say(message: str) -> None:
    console.print(f"[dim]==> {message}[/dim]")


class _clear_errors:
    """Turns our own errors into one line and an exit code."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConfigError | InvalidRequest):
            errors.print(f"outrider: {error.message}", style="red", markup=False)
            raise typer.Exit(2) from None
        if isinstance(error, KeyboardInterrupt):
            raise typer.Exit(130) from None
        if isinstance(error, OutriderError):
            errors.print(f"outrider: {error.message}", style="red", markup=False)
            raise typer.Exit(1) from None


def main() -> None:
    app()


if __name__ == "__main__":
    sys.exit(app())
