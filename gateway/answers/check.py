"""Whether an answer is what its receipt says: every token drawn again, and everything made of them compared.

An answer's tokens are the predicted output of an exact session with the same noise, so that a forward confirms up to
33 of them, and the session ends at the first that the target would not have drawn.

Not here: whose weights these are (the caller compares numerics), reading an answer (read.py), signatures.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from outrider.gateway.answers.forms import answer_stream, whole_answer
from outrider.gateway.answers.read import EVENTS, read_answer
from outrider.gateway.openai.checks import check_grammar, check_prompt, check_stop, check_token_ids, output_budget
from outrider.gateway.openai.receipt import Receipt
from outrider.gateway.openai.usage import AnswerSettings
from outrider.gateway.request.served import Served
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import ChoiceStart, GenerationUpdate, NoLog, ValidRequest
from outrider.shared.errors import InvalidRequest
from outrider.shared.request_params import MAX_SPECULATIVE_TOKENS, Speculation
from outrider.shared.sampling_params import SpeculationMode

# Of a choice or an event: how it was drafted, what was cached, and the receipt itself.
_NOT_MADE_OF_TOKENS = {"outrider", "usage", "metrics", "receipt"}
# Of whole answers other than choices: what the tokens make.
_RESPONSE_PARTS = ("output", "status", "incomplete_details")
_MESSAGE_PARTS = ("content", "stop_reason", "stop_sequence")

Generate = Callable[[ValidRequest], AsyncGenerator[GenerationUpdate, None]]
# Compares the answer that the given call makes of the drawn tokens with what was said; returns what differs.
Compare = Callable[[Callable[[], Any]], Awaitable[str]]


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


@dataclass(frozen=True)
class Form:
    """The form of an answer: is_bare: it is a receipt alone. is_stream: events, whether joined or not."""

    is_bare: bool
    is_stream: bool

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Form:
        return cls(answer.keys() == {"receipt"}, EVENTS in answer or answer.get("object") == "chat.completion.chunk")


def check_receipt(receipt: Receipt, served: Served) -> None:
    """Checks what a receipt asks for as a request is checked: it comes from anywhere. Raises InvalidRequest."""
    model, limits, requests = served.model, served.limits, receipt.record.prepared.requests
    there, here = receipt.record.prepared.options.tokenizer, served.tokenizer.digest
    if there not in ("", here):
        raise InvalidRequest(
            f"receipt: its tokens are of a tokenizer with digest {there}, those here of {here}", param="receipt"
        )
    if receipt.record.num_choices > limits.max_sequences:
        raise InvalidRequest(
            f"receipt: it has {receipt.record.num_choices} choices, the most is {limits.max_sequences}", param="receipt"
        )
    for request in requests:
        params, prompt = request.sampling_params, request.prompt_token_ids
        check_prompt(prompt, model, "receipt: prompt")
        check_stop(request.stop, limits, "receipt: stop")
        params.validate(model.vocab_size)
        output_budget(params.max_tokens, None, len(prompt), model, "receipt: max_tokens")
        if params.grammar is not None:
            check_grammar(params.grammar.text, model, limits, "receipt: grammar")
    for output in receipt.token_ids:
        check_token_ids(output, model, "receipt: token_ids")


async def redrawn(
    receipt: Receipt,
    form: Form,
    compare: Compare,
    generate: Generate,
    tokenizer: Tokenizer,
    *,
    num_ahead: int = MAX_SPECULATIVE_TOKENS,
    owner: str = "",
    caller: str = "",
) -> Verification:
    """Draws a checked receipt's tokens again, and has what the answer has besides its receipt compared.

    num_ahead: tokens that a forward may confirm besides one. owner, caller: as in ValidRequest. Raises InvalidRequest
    for a receipt from which no answer can be made, and what `generate` raises.
    """
    unseeded = receipt.unseeded_choice()
    if unseeded is not None:
        return Verification(0, wrong=f"choice {unseeded} has other noise than its seed's")
    record, num_confirmed = receipt.record, 0
    prepared = replace(record.prepared, options=replace(record.prepared.options, receipt=False))
    settings = AnswerSettings(tokenizer)
    try:
        whole, stream = whole_answer(prepared, settings), answer_stream(prepared, settings)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"receipt: it cannot be read: {error}", param="receipt") from error
    events = bytearray()
    for choice, claimed in enumerate(receipt.token_ids):
        prompt, place = record.place(choice)
        start = ChoiceStart(
            place, SpeculationMode.EXACT, record.stream_keys[prompt][place], NoLog(), numerics=record.numerics
        )
        asked = record.prepared.requests[prompt]
        request = replace(
            asked,
            request_id=f"receipt-{secrets.token_hex(16)}",  # its own may be in use
            speculation=Speculation(method="ngram", num_speculative_tokens=num_ahead),
            predicted_token_ids=claimed[: asked.sampling_params.max_tokens],
            owner=owner,
            caller=caller,
            starts=(start,),
        )
        drawn = 0
        async with aclosing(generate(request)) as updates:
            async for update in updates:
                for token_id in update.token_ids:
                    if drawn >= len(claimed) or claimed[drawn] != token_id:
                        difference = _difference(tokenizer, choice, drawn, claimed, token_id)
                        return Verification(num_confirmed, wrong=difference)
                    drawn += 1
                    num_confirmed += 1
                if form.is_stream:
                    events += stream.events(prompt, update)
                elif not form.is_bare:
                    whole.add(prompt, update)
        if drawn < len(claimed):
            return Verification(num_confirmed, wrong=f"choice {choice} ends after {drawn} tokens")
    if form.is_bare:
        return Verification(num_confirmed)

    def made() -> Any:
        return read_answer((events + stream.end()).decode(), "the stream") if form.is_stream else whole.body()

    return Verification(num_confirmed, wrong=await compare(made))


def _difference(tokenizer: Tokenizer, choice: int, place: int, claimed: tuple[int, ...], token_id: int) -> str:
    def shown(one: int) -> str:
        return f"{one} ({tokenizer.decode([one], False)!r})"

    said = f"token {place} of choice {choice} is {shown(token_id)}"
    return said + (f", not {shown(claimed[place])}" if place < len(claimed) else ", and the answer ends before it")


def other_part(made: Any, answer: Mapping[str, Any]) -> str:
    """Names the first part of the answer that its tokens do not make; empty: there is none."""
    if EVENTS in made:
        return _other_entry(made[EVENTS], answer.get(EVENTS), "event")
    if "choices" in made:
        return _other_entry(made["choices"], answer.get("choices"), "choice")
    for name in _MESSAGE_PARTS if made.get("type") == "message" else _RESPONSE_PARTS:
        if not _same(made[name], answer.get(name)):
            return f"its tokens make another {name}"
    return ""


def _other_entry(made: list[Any], entries: Any, kind: str) -> str:
    if not isinstance(entries, list) or len(entries) != len(made):
        return f"the answer has not the {len(made)} {kind}s of its receipt"
    for index, (one, other) in enumerate(zip(made, entries, strict=True)):
        if not isinstance(other, Mapping):
            return f"{kind} {index} is no object"
        for name in sorted((one.keys() | other.keys()) - _NOT_MADE_OF_TOKENS):
            if not _same(_comparable(one.get(name)), _comparable(other.get(name))):
                return f"{kind} {index}: its tokens make another {name}"
    return ""


def _comparable(part: Any) -> Any:
    """Returns a part of an event without what does not follow from tokens, such as the usage in a begun message."""
    if not isinstance(part, Mapping):
        return part
    return {name: value for name, value in part.items() if name not in _NOT_MADE_OF_TOKENS}


def _same(made: Any, said: Any) -> bool:
    """Returns whether a value that tokens make is what an answer says. Not by JSON of both: other threads would wait
    for one long call of its parser.
    """
    if isinstance(made, Mapping):
        return isinstance(said, Mapping) and made.keys() == said.keys() and all(_same(made[n], said[n]) for n in made)
    if isinstance(made, list | tuple):
        return isinstance(said, list) and len(made) == len(said) and all(map(_same, made, said))
    if isinstance(made, float):  # log-probabilities travel between the services in 32 bits
        made = struct.unpack("f", struct.pack("f", made))[0]
    return bool(made == said)
