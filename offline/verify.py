"""`outrider verify FILE --model PATH` (or `python -m outrider.offline.verify`): are these the tokens of these weights?

FILE is an answer with a receipt ("receipt": true in its request), as JSON or as the events of its stream. Its tokens
are the drafts of an exact session with the same noise: a forward confirms up to 33 of them, and the first that the
target would not have drawn is named.

Not here: receipts of rejection mode, which has no public noise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from rich.console import Console

from outrider.gateway.answers.read import read_answer
from outrider.gateway.openai.answer_body import WholeAnswer
from outrider.gateway.openai.answer_stream import AnswerStream
from outrider.gateway.openai.checks import check_grammar, check_prompt, check_stop, check_token_ids, output_budget
from outrider.gateway.openai.receipt import Receipt
from outrider.gateway.openai.receipt_signature import load_public_key, signature_fault
from outrider.gateway.openai.usage import SpecMetricsLevel
from outrider.gateway.request.types import ChoiceStart
from outrider.offline.generation import NoLog
from outrider.offline.llm import LLM
from outrider.shared.command_line import run_command
from outrider.shared.errors import InvalidRequest, OutriderError
from outrider.shared.request_params import MAX_SPECULATIVE_TOKENS, Speculation
from outrider.shared.sampling_params import SpeculationMode

# Of a choice: they say how it was drafted, not what it is.
_ABOUT_DRAFTS = {"outrider"}


@dataclass(frozen=True)
class Verification:
    """What came of an answer. wrong: what is not confirmed; empty: everything is. other_kind: this machine's
    arithmetic is another one than the receipt's, so that a difference says nothing.
    """

    num_tokens: int
    wrong: str = ""
    other_kind: str = ""

    @property
    def exit_code(self) -> int:
        return 3 if self.other_kind else 1 if self.wrong else 0

    @property
    def conclusion(self) -> str:
        if self.other_kind:
            return f"cannot say: {self.other_kind}"
        return f"not confirmed: {self.wrong}" if self.wrong else f"confirmed: all {self.num_tokens} tokens"


class ReceiptVerifier(LLM):
    """A loaded target that draws the tokens of answers again."""

    def __init__(self, model: str | Path, **arguments: Any) -> None:
        super().__init__(model, speculative_config={"method": "ngram"}, **arguments)
        from outrider.engine.numerics import measure_numerics  # loads torch

        size = arguments.get("tensor_parallel_size", 1)
        self.numerics = measure_numerics(self._engines.loaded, tensor_parallel_size=size, graphs=True)

    def verify(self, answer: Mapping[str, Any], public_key: Ed25519PublicKey | None = None) -> Verification:
        """public_key: that the receipt must be signed with. Raises InvalidRequest for a receipt that cannot be read, or
        that asks for what the model does not have.
        """
        receipt = Receipt.parse(answer.get("receipt"))
        fault = signature_fault(answer["receipt"], public_key) if public_key is not None else ""
        if fault:
            return Verification(0, wrong=fault)
        self._check(receipt)
        here, there = self.numerics, receipt.record.numerics
        if there is not None and here != there:
            return Verification(0, other_kind=f"the receipt is of a verifier of kind {there}, this one is {here}")
        unseeded = receipt.unseeded_choice()
        if unseeded is not None:
            return Verification(0, wrong=f"choice {unseeded} has other noise than its seed's")
        return self._loop.run(self._redraw(answer, receipt))

    def _check(self, receipt: Receipt) -> None:
        """As a gateway checks a request: a receipt comes from anywhere. Raises InvalidRequest."""
        model, limits = self._served.model, self._served.limits
        for request in receipt.record.prepared.requests:
            params, prompt = request.sampling_params, request.prompt_token_ids
            check_prompt(prompt, model, "receipt: prompt")
            check_stop(request.stop, limits, "receipt: stop")
            params.validate(model.vocab_size)
            output_budget(params.max_tokens, None, len(prompt), model, "receipt: max_tokens")
            if params.grammar is not None:
                check_grammar(params.grammar.text, model, limits, "receipt: grammar")
        for output in receipt.token_ids:
            check_token_ids(output, model, "receipt: token_ids")

    async def _redraw(self, answer: Mapping[str, Any], receipt: Receipt) -> Verification:
        record, num_confirmed = receipt.record, 0
        prepared = replace(record.prepared, options=replace(record.prepared.options, receipt=False))
        shape = (prepared, self._generation.tokenizer, SpecMetricsLevel.NONE, "")
        whole, stream, events = WholeAnswer(*shape), AnswerStream(*shape), bytearray()
        for choice, claimed in enumerate(receipt.token_ids):
            prompt, place = record.place(choice)
            start = ChoiceStart(place, SpeculationMode.EXACT, record.stream_keys[prompt][place], NoLog())
            request = replace(
                record.prepared.requests[prompt],
                speculation=Speculation(method="ngram", num_speculative_tokens=MAX_SPECULATIVE_TOKENS),
                predicted_token_ids=claimed,
                starts=(start,),
            )
            drawn = 0
            async with aclosing(self._generation.generate(request)) as updates:
                async for update in updates:
                    for token_id in update.token_ids:
                        if drawn >= len(claimed) or claimed[drawn] != token_id:
                            return Verification(num_confirmed, wrong=self._difference(choice, drawn, claimed, token_id))
                        drawn += 1
                        num_confirmed += 1
                    whole.add(prompt, update)
                    events += stream.events(prompt, update)
            if drawn < len(claimed):
                return Verification(num_confirmed, wrong=f"choice {choice} ends after {drawn} tokens")
        streamed = answer.get("object") == "chat.completion.chunk"
        made = read_answer(events.decode(), "the stream") if streamed else whole.body()
        return Verification(num_confirmed, wrong=_other_choice(made, answer))

    def _difference(self, choice: int, place: int, claimed: tuple[int, ...], token_id: int) -> str:
        shown = f"token {place} of choice {choice} is {self._shown(token_id)}"
        return shown + (
            f", not {self._shown(claimed[place])}" if place < len(claimed) else ", and the answer ends before it"
        )

    def _shown(self, token_id: int) -> str:
        return f"{token_id} ({self._generation.tokenizer.decode([token_id], False)!r})"


def _other_choice(drawn: Any, answer: Mapping[str, Any]) -> str:
    """Names the first field of a choice that its tokens do not make; empty: there is none."""
    choices = answer.get("choices")
    made = json.loads(json.dumps(drawn["choices"]), parse_float=_as_on_the_wire)
    if not isinstance(choices, list) or len(choices) != len(made):
        return f"the answer has not the {len(made)} choices of its receipt"
    for index, (one, other) in enumerate(zip(made, choices, strict=True)):
        if not isinstance(other, Mapping):
            return f"choice {index} is no object"
        for name in sorted((one.keys() | other.keys()) - _ABOUT_DRAFTS):
            if one.get(name) != other.get(name):
                return f"choice {index}: its tokens make another {name}"
    return ""


def _as_on_the_wire(text: str) -> float:
    """Log-probabilities travel between the services in 32 bits."""
    return float(np.float32(text))


def main(
    file: Annotated[Path, typer.Argument(help="An answer with a receipt: its JSON, or the events of its stream.")],
    model: Annotated[str, typer.Option(help="Folder of the target's HF checkpoint, or a .gguf file.")],
    public_key: Annotated[
        Path | None, typer.Option(help="PEM of the server's public key: the receipt must be signed with it.")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="0: every core.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Draw every token of an answer again, from its receipt and the weights.

    Exit codes: 0 all tokens confirmed, 1 not confirmed, 2 wrong usage, 3 cannot say (another kind of arithmetic).

    Example: outrider verify answer.json --model models/demo-target
    """
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    try:
        answer = _read(file)
        key = load_public_key(public_key, "public-key") if public_key is not None else None
        receipt = Receipt.parse(answer.get("receipt"))
        with ReceiptVerifier(model, num_threads=threads, **_arguments(receipt.record.numerics)) as verifier:
            found = verifier.verify(answer, key)
    except OutriderError as error:
        errors.print(f"outrider: {error.message}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if as_json:
        console.print_json(
            json.dumps({"confirmed": found.exit_code == 0, "num_tokens": found.num_tokens, "said": found.conclusion})
        )
    else:
        console.print(found.conclusion, markup=False, soft_wrap=True)
    raise typer.Exit(found.exit_code)


def _arguments(numerics: str | None) -> dict[str, Any]:
    """Loads the model as the verifier of the receipt did (engine/numerics.py has the form)."""
    found = re.match(r"(\w+)[^/]*?(?:\+kv-(\w+))?/(\w+)/\w+/tp(\d{1,3})/", numerics or "")
    if found is None:
        return {}
    dtype, kv_cache, device, size = found.groups()
    kv_cache = kv_cache or "auto"
    return {"dtype": dtype, "kv_cache_dtype": kv_cache, "device": device, "tensor_parallel_size": int(size)}


def _read(file: Path) -> Mapping[str, Any]:
    """Raises InvalidRequest."""
    try:
        return read_answer(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise InvalidRequest(f"{file}: {error.strerror}", param="FILE") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{file}: {error}", param="FILE") from error


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    run_command(app, "outrider verify")
