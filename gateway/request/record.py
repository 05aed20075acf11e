"""The record from which any gateway can continue a request. Stored in Redis; written once, before the first token.

Not here: the tokens themselves (commit_sink.py, shared/log/commit_log.py), and who reads it (start.py).
"""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from outrider.gateway.request.answers import AnswerKind, AnswerOptions, Prepared
from outrider.gateway.request.types import METHOD_AUTO, ValidRequest
from outrider.gateway.tool_calls.plan import OutputPlan
from outrider.shared.errors import InternalError, Unavailable
from outrider.shared.request_params import Speculation
from outrider.shared.sampling_params import SamplingParams, SpeculationMode, stream_key
from outrider.shared.wire import from_message, params_from_wire, params_to_wire, to_message
from outrider.shared.wire.common import MODE_FROM_WIRE, MODE_TO_WIRE
from outrider.v1 import common_pb2 as common
from outrider.v1 import log_pb2 as pb

# Grows with every change that an older gateway would misread. It covers CommitExtras too.
RECORD_VERSION = 6
# Versions for requests that need no more, so that an older gateway can continue them.
_CALLS_RECORD_VERSION = 5
_FIELDS_RECORD_VERSION = 4
_DOORS_RECORD_VERSION = 3
_PARSED_RECORD_VERSION = 2
_PLAIN_RECORD_VERSION = 1


@dataclass(frozen=True)
class SessionRecord:
    """The stored form of a request. It contains everything random about the request.

    modes: per prompt. stream_keys: per prompt, per choice. numerics: the kind of verifier that its exact prompts are
    decoded by; None: an older gateway did not settle it.
    """

    kind: AnswerKind
    prepared: Prepared
    modes: tuple[SpeculationMode, ...]
    stream_keys: tuple[tuple[int, ...], ...]
    nonce: bytes = b""
    numerics: str | None = None

    @property
    def request_id(self) -> str:
        return self.prepared.options.answer_id

    @property
    def owner(self) -> str:
        return self.prepared.requests[0].owner

    @property
    def num_choices(self) -> int:
        return sum(map(len, self.stream_keys))

    def place(self, choice: int) -> tuple[int, int]:
        """Returns the index of the prompt, and of the choice within it, for a choice of the answer (prompts first)."""
        return divmod(choice, self.prepared.requests[0].n)

    def encode(self) -> bytes:
        lists = _shared_lists(self.prepared.requests)
        return pb.SessionRecord(
            version=_version(self.prepared) if lists is None else _CALLS_RECORD_VERSION,
            kind=self.kind.value,
            owner=self.owner,
            nonce=self.nonce,
            options=_options_to_wire(self.prepared.options),
            numerics=self.numerics,
            shared_lists=params_to_wire(lists) if lists is not None else None,
            prompts=[
                _prompt_to_wire(request if lists is None else _with_lists(request, SamplingParams()), mode, keys)
                for request, mode, keys in zip(self.prepared.requests, self.modes, self.stream_keys, strict=True)
            ],
        ).SerializeToString(deterministic=True)  # a receipt has these bytes, whichever gateway ends the answer

    @classmethod
    def decode(cls, data: bytes) -> SessionRecord:
        """Raises Unavailable when another version of the gateway has written it, InternalError when it is broken."""
        try:
            message = pb.SessionRecord.FromString(data)
        except DecodeError as error:
            raise InternalError(f"the record of a request is broken: {error}") from None
        if not _PLAIN_RECORD_VERSION <= message.version <= RECORD_VERSION:
            raise Unavailable(
                f"this request was begun by another version of the gateway (its record has version {message.version}, "
                f"this gateway reads {RECORD_VERSION}); resume it at a gateway of that version"
            )
        nums_choices = {len(prompt.stream_keys) for prompt in message.prompts}
        if not any(nums_choices):
            raise InternalError("the record of a request is broken: it has no prompt or no choice")
        if len(nums_choices) > 1:
            raise InternalError("the record of a request is broken: its prompts differ in their number of choices")
        options = _options_from_wire(message.options)
        requests = tuple(_prompt_from_wire(prompt, message.owner, options.output) for prompt in message.prompts)
        if message.HasField("shared_lists"):
            lists = params_from_wire(message.shared_lists)
            requests = tuple(_with_lists(request, lists) for request in requests)
        return cls(
            kind=_known_kind(message),
            prepared=Prepared(requests, options),
            modes=tuple(_known_mode(prompt) for prompt in message.prompts),
            stream_keys=tuple(tuple(prompt.stream_keys) for prompt in message.prompts),
            nonce=message.nonce,
            numerics=message.numerics if message.HasField("numerics") else None,
        )


def _version(prepared: Prepared) -> int:
    options = prepared.options
    if options.fills_context or any(request.predicted_token_ids for request in prepared.requests):
        return RECORD_VERSION
    if options.output is not None and options.output.ends_with_call:
        return _CALLS_RECORD_VERSION
    if any(request.sampling_params.logprob_token_ids for request in prepared.requests):
        return _CALLS_RECORD_VERSION
    if options.return_tokens_as_token_ids or (options.chat and options.echo_texts is not None):
        return _FIELDS_RECORD_VERSION
    if options.response is not None or options.message:
        return _DOORS_RECORD_VERSION
    return _PLAIN_RECORD_VERSION if options.output is None else _PARSED_RECORD_VERSION


def new_record(kind: AnswerKind, prepared: Prepared, numerics: str | None = None) -> SessionRecord:
    """Settles what is still open about a request: its mode, its noise where it has no seed, its kind of verifier."""
    return SessionRecord(
        kind=kind,
        prepared=prepared,
        modes=tuple(_mode(request) for request in prepared.requests),
        stream_keys=tuple(
            tuple(_stream_key(request, choice) for choice in range(request.n)) for request in prepared.requests
        ),
        nonce=secrets.token_bytes(8),
        numerics=numerics,
    )


def _shared_lists(requests: tuple[ValidRequest, ...]) -> SamplingParams | None:
    """Returns lists that all prompts share, to store once: 1,024 bad words for each of 17 prompts took 290 KB, 6 ms."""
    first = requests[0].sampling_params
    lists = SamplingParams(bad_words=first.bad_words, logit_bias=first.logit_bias)
    others = [request.sampling_params for request in requests[1:]]
    has_any = bool(others and (lists.bad_words or lists.logit_bias))
    same = all((other.bad_words, other.logit_bias) == (lists.bad_words, lists.logit_bias) for other in others)
    return lists if has_any and same else None


def _with_lists(request: ValidRequest, lists: SamplingParams) -> ValidRequest:
    params = dataclasses.replace(request.sampling_params, bad_words=lists.bad_words, logit_bias=lists.logit_bias)
    return dataclasses.replace(request, sampling_params=params)


def _mode(request: ValidRequest) -> SpeculationMode:
    asked = request.speculation.mode
    return SpeculationMode(asked) if asked else request.sampling_params.default_mode


def _known_kind(message: pb.SessionRecord) -> AnswerKind:
    try:
        return AnswerKind(message.kind)
    except ValueError:
        raise InternalError(f"the record of a request is broken: kind {message.kind}") from None


def _known_mode(message: pb.RecordedPrompt) -> SpeculationMode:
    mode = MODE_FROM_WIRE.get(message.mode)
    if mode is None:
        raise InternalError(f"the record of a request is broken: mode {message.mode}")
    return mode


def _stream_key(request: ValidRequest, choice: int) -> int:
    params = request.sampling_params
    # Exact mode by name without a seed: the noise is fresh, but the output still does not depend on the draft.
    seed = params.seed if params.seed is not None else (0 if params.greedy else secrets.randbits(64))
    return stream_key(seed, request.prompt_token_ids, choice)


def _options_to_wire(options: AnswerOptions) -> pb.AnswerOptions:
    message = to_message(pb.AnswerOptions(), options, skipped=("echo_texts",))
    message.echo = options.echo_texts is not None
    message.echo_texts.extend(options.echo_texts or ())
    return message


def _options_from_wire(message: pb.AnswerOptions) -> AnswerOptions:
    echo_texts = tuple(message.echo_texts) if message.echo else None
    return from_message(AnswerOptions, message, skipped=("echo_texts",), echo_texts=echo_texts)


def _prompt_to_wire(request: ValidRequest, mode: SpeculationMode, stream_keys: tuple[int, ...]) -> pb.RecordedPrompt:
    return pb.RecordedPrompt(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=params_to_wire(request.sampling_params),
        stop=request.stop,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        speculation=to_message(common.Speculation(), request.speculation),
        cache_salt=request.cache_salt,
        predicted_token_ids=request.predicted_token_ids,
        mode=MODE_TO_WIRE[mode],
        stream_keys=stream_keys,
    )


def _prompt_from_wire(message: pb.RecordedPrompt, owner: str, output: OutputPlan | None) -> ValidRequest:
    return ValidRequest(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling_params=params_from_wire(message.sampling_params),
        n=len(message.stream_keys),
        stop=tuple(message.stop),
        include_stop_str_in_output=message.include_stop_str_in_output,
        skip_special_tokens=message.skip_special_tokens,
        speculation=from_message(Speculation, message.speculation, method=METHOD_AUTO),
        cache_salt=message.cache_salt,
        predicted_token_ids=tuple(message.predicted_token_ids),
        marker_tokens=output.marker_tokens if output is not None else (),
        only_call=output if output is not None and output.ends_with_call else None,
        owner=owner,
    )
