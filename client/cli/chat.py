"""`outrider chat`: one question, or a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from contextlib import closing, suppress
from dataclasses import asdict
from typing import Annotated

import typer

from outrider.client.api.blocking import OutriderClient
from outrider.client.chat import Conversation
from outrider.client.cli.common import (
    DEFAULT_RUN_DIR,
    Address,
    ApiKey,
    Json,
    Method,
    NumSpeculativeTokens,
    Prediction,
    RunDir,
    TlsCaFile,
    TlsCertFile,
    TlsKeyFile,
    Url,
    clear_address,
    clear_errors,
    console,
    errors,
    grpc_target,
    predicted_text,
    print_json,
)
from outrider.client.display import LEGEND, StreamFigures, announced, show_stream, summary
from outrider.shared.errors import InvalidRequest, OutriderError
from outrider.shared.request_params import SamplingParams, Speculation
from outrider.shared.tls import client_tls

NoSpeculation = Annotated[
    bool, typer.Option("--no-speculation", help="Target model only, for comparison: --method off.")
]


def chat(
    question: Annotated[
        str, typer.Argument(help="One question; without it, standard input or an interactive chat.")
    ] = "",
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1)] = 512,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    method: Method = "auto",
    num_speculative_tokens: NumSpeculativeTokens = 0,
    prediction: Prediction = None,
    no_speculation: NoSpeculation = False,
    url: Url = "",
    address: Address = "",
    api_key: ApiKey = "",
    tls_ca_file: TlsCaFile = "",
    tls_cert_file: TlsCertFile = "",
    tls_key_file: TlsKeyFile = "",
    run_dir: RunDir = DEFAULT_RUN_DIR,
    as_json: Json = False,
) -> None:
    """Chat with the model; draft tokens are marked. Only the answer goes to standard output.

    In an interactive chat, Ctrl-C stops the answer, /reset clears the history, /exit or Ctrl-D ends.

    Examples:

      outrider chat

      outrider chat "Add two numbers." --no-speculation

      git diff | outrider chat --url https://llm.example > answer.txt
    """
    with clear_errors():
        params = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
            prediction=predicted_text(prediction),
            speculation=Speculation(
                method="off" if no_speculation else method, num_speculative_tokens=num_speculative_tokens
            ),
        )
        tls = client_tls(tls_cert_file, tls_key_file, tls_ca_file, setting="tls")
        address, api_key = grpc_target(address, url, api_key, tls, run_dir)
        with OutriderClient(address, api_key=api_key, tls=tls, timeout_s=None) as client:
            conversation = Conversation(client, params, system)
            if not question and sys.stdin.isatty():
                _converse(conversation, address, as_json=as_json)
            else:
                with clear_address(address):
                    _answer_once(conversation, question or sys.stdin.read(), as_json=as_json)


def _answer_once(conversation: Conversation, question: str, *, as_json: bool) -> None:
    if not question.strip():
        raise InvalidRequest("no question was given, neither as an argument nor on standard input")
    if not as_json:
        _answer(conversation, question, with_legend=True)
        return
    started = time.perf_counter()
    *_, end = conversation.ask(question)
    seconds = time.perf_counter() - started
    print_json({"text": conversation.messages[-1]["content"], "seconds": seconds, **asdict(end)})


def _converse(conversation: Conversation, address: str, *, as_json: bool) -> None:
    if as_json:
        raise InvalidRequest("--json needs one question: give it as an argument or on standard input")
    with suppress(ImportError):  # arrow keys and history, if Python was built with readline
        import readline  # noqa: F401
    errors.print("[dim]/reset clears the history, /exit or Ctrl-D ends, Ctrl-C stops an answer[/dim]")
    with_legend = True
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print()
            continue
        if question == "/exit":
            return
        if question == "/reset":
            conversation.reset()
            errors.print("[dim]history cleared[/dim]")
        elif question.startswith("/"):
            errors.print(f"{question.split()[0]} is not a command: /reset, /exit", markup=False)
        elif question:
            answered = _answer_or_say_why(conversation, question, address, with_legend=with_legend)
            with_legend = with_legend and not answered


def _answer_or_say_why(conversation: Conversation, question: str, address: str, *, with_legend: bool) -> bool:
    """Reports an error; a failed answer does not end the conversation. True: it was answered."""
    try:
        with clear_address(address):
            _answer(conversation, question, with_legend=with_legend)
    except KeyboardInterrupt:
        errors.print("\n[dim]stopped[/dim]")
    except OutriderError as error:
        errors.print(f"\noutrider: {error.message}", style="red", markup=False, soft_wrap=True)
        return False
    return True


def _answer(conversation: Conversation, question: str, *, with_legend: bool) -> StreamFigures:
    with closing(conversation.ask(question)) as stream:
        shown = announced(stream, lambda: errors.print(LEGEND)) if with_legend else stream
        figures = show_stream(console, shown, time.perf_counter)
    errors.print(f"[dim]{summary(figures)}[/dim]", soft_wrap=True)
    return figures
