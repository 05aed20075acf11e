"""`outrider up`, `down` and `demo`: the stack on this machine."""

from __future__ import annotations

import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from client.cli_common import DEFAULT_RUN_DIR, Json, RunDir, clear_errors, console, errors, print_json, say, say_aside
from client.display import LEGEND, show_stream, summary
from client.generate import CompletionRequest, stream_completion
from client.stack import Progress, Stack, stop_running
from client.stack_commands import StackSettings, StackState
from shared.errors import ConfigError, OutriderError

# No line break at the end: the tokenizer keeps it together with the indent that follows.
DEMO_PROMPT = '''def read_lines(path):
    """Return the lines of a text file as a list."""'''

Model = Annotated[str, typer.Option(help="Folder of the target's HF checkpoint.")]
DraftModel = Annotated[
    str, typer.Option(help="Folders of draft models and trained heads, comma-separated; empty: n-gram only.")
]
Port = Annotated[int, typer.Option(help="REST port.", envvar="OUTRIDER_PORT")]
GrpcPort = Annotated[int, typer.Option(help="gRPC port for clients.", envvar="OUTRIDER_GRPC_PORT")]
Host = Annotated[str, typer.Option(help="Address of the REST and gRPC doors.")]
RedisUrl = Annotated[str, typer.Option(help="Redis to use; empty: start one.", envvar="OUTRIDER_REDIS_URL")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16 or float32.")]
Drafters = Annotated[
    int,
    typer.Option(min=0, max=64, help="Drafter processes; 0: the verifier drafts by itself, fastest on one machine."),
]
_SPEC_HELP = """vLLM's JSON, e.g. '{"method": "ngram", "num_speculative_tokens": 4}'."""
SpecConfig = Annotated[str, typer.Option("--speculative-config", "-sc", help=_SPEC_HELP)]


def up(
    model: Model = "models/demo-target",
    draft_model: DraftModel = "models/demo-draft",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    grpc_port: GrpcPort = 8001,
    redis_url: RedisUrl = "",
    dtype: Dtype = "auto",
    drafters: Drafters = 0,
    speculative_config: SpecConfig = "",
    run_dir: RunDir = DEFAULT_RUN_DIR,
    detach: Annotated[bool, typer.Option(help="Return when the stack is ready.")] = False,
    as_json: Json = False,
) -> None:
    """Start Redis, a verifier, the gateway and, where asked for, drafters on this machine.

    Examples:

      outrider up

      outrider up --model ~/checkpoints/llama --draft-model "" --port 9000

      outrider up --drafters 2

      outrider up --detach && outrider chat "Hello." && outrider down
    """
    with clear_errors():
        check_folders(model, draft_model)
        settings = StackSettings(
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
        stack = _started(settings, run_dir, say_aside if as_json else say)
        if detach:
            _show(stack.state, as_json=as_json)
        else:
            _run_until_interrupt(stack, as_json=as_json)


def down(run_dir: RunDir = DEFAULT_RUN_DIR, as_json: Json = False) -> None:
    """Stop the stack that `outrider up` started from this folder.

    Example: outrider down
    """
    with clear_errors():
        stopped = stop_running(run_dir, say_aside if as_json else say)
        if as_json:
            print_json({"stopped": stopped})
        elif not stopped:
            console.print("no stack is running")


def demo(
    once: Annotated[bool, typer.Option(help="Exit after the completion.")] = False,
    port: Port = 8000,
    grpc_port: GrpcPort = 8001,
    redis_url: RedisUrl = "",
    run_dir: RunDir = DEFAULT_RUN_DIR,
) -> None:
    """Start the demo stack, stream a completion with draft tokens marked, stay up until Ctrl-C.

    Example: outrider demo --once
    """
    with clear_errors():
        model, draft_model = "models/demo-target", "models/demo-draft"
        check_folders(model, draft_model)
        settings = StackSettings(model, draft_model, port=port, grpc_port=grpc_port, redis_url=redis_url)
        stack = _started(settings, run_dir, say)
        try:
            _stream_demo(stack.state.grpc_address)
        except BaseException:
            stack.stop()
            raise
        if once:
            show_running(stack.state)
            stack.stop()
        else:
            _run_until_interrupt(stack)


def run_in_foreground(settings: StackSettings, run_dir: Path) -> None:
    """Until Ctrl-C or SIGTERM. Raises OutriderError."""
    _run_until_interrupt(_started(settings, run_dir, say))


def _started(settings: StackSettings, run_dir: Path, progress: Progress) -> Stack:
    signal.signal(signal.SIGTERM, _raise_interrupt)  # the children are in sessions of their own
    stack = Stack(settings, run_dir, progress)
    stack.start()
    return stack


def _show(state: StackState, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(state))
    else:
        show_running(state)


def show_running(state: StackState) -> None:
    lines = (
        f"REST   {state.url}/v1  (OpenAI API; also /ready, /metrics)",
        f"gRPC   {state.grpc_address}  (outrider.v1.Gateway)",
        f"fleet  {len(state.verifiers)} verifier, {_drafters(state)}, {state.redis_url}",
    )
    for line in lines:
        console.print(line, soft_wrap=True)


def _drafters(state: StackState) -> str:
    return f"{len(state.drafters)} drafter" if state.drafters else "which drafts by itself"


def _stream_demo(grpc_address: str) -> None:
    console.print()
    console.print(LEGEND)
    console.print()
    console.print(DEMO_PROMPT, style="bold", end="")
    # Sampled, with a seed: greedy text of a model this small soon goes in circles.
    request = CompletionRequest(
        DEMO_PROMPT, 160, temperature=0.7, seed=3, method="draft_model", num_speculative_tokens=5
    )
    figures = show_stream(console, stream_completion(grpc_address, request), time.perf_counter)
    console.print()
    console.print(summary(figures))


def check_folders(model: str, draft_model: str) -> None:
    """Raises ConfigError that names the option; draft_model: several, comma-separated."""
    folders = [("--model", model), *(("--draft-model", folder) for folder in draft_model.split(","))]
    for name, folder in folders:
        if folder and not (Path(folder) / "config.json").is_file():
            raise ConfigError(
                f"{name}: {folder} is not a checkpoint folder (no config.json). Give the folder of an HF checkpoint; "
                "the demo models are in the source repository, not in the wheel"
            )


def _run_until_interrupt(stack: Stack, *, as_json: bool = False) -> None:
    """Whoever waits for stack.json may interrupt before the addresses are shown: that too stops the stack."""
    try:
        _show(stack.state, as_json=as_json)
        say_aside("Ctrl-C stops the stack")
        dead = stack.wait()
    except KeyboardInterrupt:
        errors.print()
        stack.stop()
        return
    except BaseException:
        stack.stop()
        raise
    tail = stack.log_tail(dead)
    stack.stop()
    raise OutriderError(f"{dead} died; its last words:\n{tail}")


def _raise_interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
