"""Receipts: what anybody with the weights needs to draw every token of an exact answer again.

In exact mode an answer is a function of weights, arithmetic, prompt, parameters and the noise of the seed. The record
of a request (gateway/request/record.py) has all but the first two, which `numerics` names (engine/numerics.py).

Not here: drawing the tokens again (offline/verify.py).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.gateway.openai.answer_types import ReceiptBody
from outrider.gateway.request.answers import AnswerKind, AnswerOptions, Prepared
from outrider.gateway.request.record import SessionRecord
from outrider.shared.errors import InvalidRequest, OutriderError
from outrider.shared.sampling_params import SpeculationMode, stream_key

RECEIPT_VERSION = 1


@dataclass(frozen=True)
class Receipt:
    """record: without owner and cache salt, which are the caller's own. token_ids: per choice of the answer."""

    record: SessionRecord
    token_ids: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, prepared: Prepared, token_ids: tuple[tuple[int, ...], ...]) -> Receipt:
        """Returns the receipt of an answer whose requests have started."""
        requests = tuple(replace(request, owner="", cache_salt="") for request in prepared.requests)
        starts = [request.starts for request in requests]
        options = prepared.options
        if options.response is not None:  # the conversation is in the prompt
            options = replace(options, response=replace(options.response, input_items=""))
        record = SessionRecord(
            kind=_kind(options),
            prepared=Prepared(requests, options),
            modes=tuple(choices[0].mode for choices in starts),
            stream_keys=tuple(tuple(choice.stream_key for choice in choices) for choices in starts),
            numerics=starts[0][0].numerics,
        )
        return cls(record, token_ids)

    def body(self) -> ReceiptBody:
        return {
            "version": RECEIPT_VERSION,
            "numerics": self.record.numerics,
            "tokenizer": self.record.prepared.options.tokenizer,
            "token_ids": [list(output) for output in self.token_ids],
            "request": base64.b64encode(self.record.encode()).decode(),
        }

    @classmethod
    def parse(cls, body: object) -> Receipt:
        """Raises InvalidRequest for what is no receipt, or one of another version."""
        if not isinstance(body, Mapping) or body.get("version") != RECEIPT_VERSION:
            raise InvalidRequest(f"receipt: not a receipt of version {RECEIPT_VERSION}", param="receipt")
        try:
            record = SessionRecord.decode(base64.b64decode(body["request"], validate=True))
            token_ids = tuple(tuple(map(_token_id, output)) for output in body["token_ids"])
        except (KeyError, TypeError, ValueError, binascii.Error, OutriderError) as error:
            raise InvalidRequest(f"receipt: it cannot be read: {error}", param="receipt") from error
        if len(token_ids) != record.num_choices or not all(token_ids):
            raise InvalidRequest("receipt: it needs the tokens of every choice", param="receipt")
        if any(mode is not SpeculationMode.EXACT for mode in record.modes):
            raise InvalidRequest("receipt: only exact answers can be verified", param="receipt")
        return cls(record, token_ids)

    def unseeded_choice(self) -> int | None:
        """Returns the first choice whose noise is not that of its seed; None: all are."""
        for choice in range(self.record.num_choices):
            prompt, place = self.record.place(choice)
            request = self.record.prepared.requests[prompt]
            params = request.sampling_params
            seed = 0 if params.seed is None and params.greedy else params.seed
            if seed is not None:  # else the gateway drew the noise
                key = stream_key(seed, request.prompt_token_ids, place)
                if key != self.record.stream_keys[prompt][place]:
                    return choice
        return None


def _kind(options: AnswerOptions) -> AnswerKind:
    if options.response is not None:
        return AnswerKind.RESPONSE
    if options.message:
        return AnswerKind.MESSAGE
    return AnswerKind.CHAT if options.chat else AnswerKind.COMPLETION


def _token_id(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no token id")
    return value
