"""`outrider up` and `down`: the stack on this machine."""

from __future__ import annotations

import signal
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from outrider.client.cli.common import (
    DEFAULT_RUN_DIR,
    Json,
    RunDir,
    clear_errors,
    console,
    errors,
    print_json,
    say,
    say_aside,
)
from outrider.client.stack.commands import StackSettings, StackState
from outrider.client.stack.installation import check_server_installed
from outrider.client.stack.local_models import with_folders
from outrider.client.stack.processes import Progress, Stack, read_state, stop_running
from outrider.client.stack.published_drafts import unused_draft
from outrider.client.stack.supervisor import supervise
from outrider.shared.command_line import from_arguments

Model = Annotated[str, typer.Option(help="Folder of the target's HF checkpoint, or a .gguf file.")]
DraftModel = Annotated[
    str,
    typer.Option(
        help="Folders (or .gguf files) of draft models and trained heads, comma-separated, several of one kind as "
        "NAME=FOLDER; empty: the target's MTP layer, if it has one, and n-grams."
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="REST port.", envvar="OUTRIDER_PORT")]
GrpcPort = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, help="gRPC port for clients; left out: the one after --port.", envvar="OUTRIDER_GRPC_PORT"
    ),
]
Host = Annotated[str, typer.Option(help="Address that the HTTP and gRPC servers listen on.")]
RedisUrl = Annotated[str, typer.Option(help="Redis to use; empty: start one.", envvar="OUTRIDER_REDIS_URL")]
Dtype = Annotated[Literal["auto", "bfloat16", "float16", "float32"], typer.Option(help="Of weights and KV cache.")]
KvCacheType = Annotated[
    Literal["auto", "fp8", "int8"],
    typer.Option(help="Of the target's KV cache; fp8 or int8: twice the positions of bfloat16."),
]
Drafters = Annotated[
    int,
    typer.Option(
        min=0, max=64, help="Drafter processes; 0: the verifier drafts in its own process, fastest on one machine."
    ),
]
AllowDraftLoading = Annotated[
    bool,
    typer.Option("--allow-draft-loading", help="`outrider load-draft` may change the drafts while serving."),
]
AllowTargetReload = Annotated[
    bool,
    typer.Option("--allow-target-reload", help="`outrider reload` may change the target's weights while serving."),
]
Learn = Annotated[
    str,
    typer.Option(
        "--learn", help="shared: the draft head is trained further on what is served; per-salt: one each; off."
    ),
]
LearnShare = Annotated[float, typer.Option("--learn-share", help="Share of one core that learning may take.")]
LearnCheckpoints = Annotated[
    str, typer.Option("--learn-checkpoints", help="Folder for heads of --learn shared (no text); empty: not kept.")
]
RecordStates = Annotated[
    str,
    typer.Option(
        "--record-hidden-states", help="Folder for served texts with hidden states, to train a head on; empty: none."
    ),
]
_SPEC_HELP = """vLLM's JSON, e.g. '{"method": "ngram", "num_speculative_tokens": 4}'."""
SpecConfig = Annotated[str, typer.Option("--speculative-config", "-sc", help=_SPEC_HELP)]


def up(
    model: Model = "models/demo-target",
    draft_model: DraftModel = "models/demo-draft",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    grpc_port: GrpcPort = None,
    redis_url: RedisUrl = "",
    dtype: Dtype = "auto",
    kv_cache_dtype: KvCacheType = "auto",
    drafters: Drafters = 0,
    speculative_config: SpecConfig = "",
    allow_draft_loading: AllowDraftLoading = False,
    allow_target_reload: AllowTargetReload = False,
    learn: Learn = "off",
    learn_share: LearnShare = 0.1,
    learn_checkpoints: LearnCheckpoints = "",
    record_hidden_states: RecordStates = "",
    run_dir: RunDir = DEFAULT_RUN_DIR,
    detach: Annotated[bool, typer.Option(help="Return when the stack is ready.")] = False,
    as_json: Json = False,
) -> None:
    """Start Redis, a verifier, the gateway and, optionally, drafters on this machine.

    A process that dies is started again on its port.

    Examples:

      outrider up

      outrider up --model ~/checkpoints/llama --draft-model "" --port 9000

      outrider up --drafters 2

      outrider up --draft-model models/demo-eagle3 --learn shared --learn-share 0.25

      outrider up --detach && outrider chat "Hello." && outrider down
    """
    with clear_errors():
        verifier_args: tuple[str, ...] = () if kv_cache_dtype == "auto" else ("--kv-cache-dtype", kv_cache_dtype)
        drafter_args = ("--allow-draft-loading", "true") if allow_draft_loading else ()
        verifier_args += ("--allow-target-reload", "true") if allow_target_reload else ()
        if learn != "off":
            verifier_args += ("--learn", learn, "--learn-share", str(learn_share))
            verifier_args += ("--learn-checkpoints", learn_checkpoints) if learn_checkpoints else ()
        verifier_args += ("--record-hidden-states", record_hidden_states) if record_hidden_states else ()
        settings = from_arguments(StackSettings, locals(), num_drafters=drafters)
        stack = started(settings, run_dir, say_aside if as_json else say, in_foreground=not detach)
        if detach:
            _leave_running(stack, as_json=as_json)
        else:
            run_until_interrupt(stack, run_dir, as_json=as_json)


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


def run_in_foreground(settings: StackSettings, run_dir: Path) -> None:
    """Runs until Ctrl-C or SIGTERM. Raises OutriderError."""
    run_until_interrupt(started(settings, run_dir, say), run_dir)


def started(settings: StackSettings, run_dir: Path, progress: Progress, *, in_foreground: bool = True) -> Stack:
    """A stack that serves. Raises OutriderError; SIGTERM is a Ctrl-C from here on."""
    signal.signal(signal.SIGTERM, _raise_interrupt)  # the children have their own process sessions
    check_server_installed()
    if read_state(run_dir) is None:  # else `start` says that a stack is running
        from outrider.client.doctor.start import check_before_start  # the client's wheel has no Redis package

        name, settings = settings.model, with_folders(settings, progress)
        if draft := unused_draft(settings, name):
            progress(f"a draft is known for this model: --speculative-config '{draft}'")
        progress("checking settings, ports and checkpoints")
        check_before_start(settings, run_dir)
    stack = Stack(settings, run_dir, progress, in_foreground=in_foreground)
    stack.start()
    return stack


def _show(state: StackState, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(state))
    else:
        show_running(state)


def show_running(state: StackState) -> None:
    page = state.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    lines = (
        f"Open {page}  (chat, completions and the fleet in a browser)",
        f"REST   {state.url}/v1  (OpenAI API; also /ready, /metrics)",
        f"gRPC   {state.grpc_address}  (outrider.v1.Gateway)",
        f"fleet  {len(state.verifiers)} verifier, {_drafters(state)}, {state.redis_url}",
    )
    for line in lines:
        console.print(line, soft_wrap=True)
    if state.num_restarts:
        died = ", ".join(f"{name} {number}" for name, number in state.num_restarts.items())
        console.print(f"restarts  {died}", soft_wrap=True)


def _drafters(state: StackState) -> str:
    return f"{len(state.drafters)} drafter" if state.drafters else "which also drafts"


def _leave_running(stack: Stack, *, as_json: bool) -> None:
    try:
        stack.leave_supervised()
    except BaseException:
        stack.stop()
        raise
    _show(stack.state, as_json=as_json)


def run_until_interrupt(stack: Stack, run_dir: Path, *, as_json: bool = False) -> None:
    """Shows the addresses, keeps the stack running, stops it; Ctrl-C may come before the addresses are shown."""
    try:
        _show(stack.state, as_json=as_json)
        say_aside("Ctrl-C stops the stack")
        supervise(run_dir, stack.state, say_aside, threading.Event())
    except KeyboardInterrupt:
        errors.print()
        stack.stop()
    except BaseException:
        stack.stop()
        raise


def _raise_interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
