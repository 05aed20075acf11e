"""The API that a request came by and how its answer is shaped, so that any gateway can continue it.

Not here: what is generated (types), and the answers themselves (openai, responses, anthropic).
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from outrider.gateway.request.event_cursor import Seen
from outrider.gateway.request.types import ValidRequest
from outrider.gateway.tool_calls.plan import OutputPlan
from outrider.shared.tracing import Carrier
from outrider.v1 import log_pb2 as pb


@dataclass(frozen=True)
class ResponsePlan:
    """The parts of a response that are known before it begins. fields: JSON, the request's fields that the answer
    repeats. input_items: JSON, the items of the input, with those of the responses before it; "" where nothing is
    stored.
    """

    fields: str
    input_items: str = ""

    @property
    def num_stored_bytes(self) -> int:
        """How many bytes of the stored response are known before it begins; 0: it will not be stored."""
        return len(self.fields) + len(self.input_items) if self.input_items else 0

    @property
    def is_background(self) -> bool:
        """True if the answer is generated to its end whether or not anyone reads it."""
        return bool(json.loads(self.fields).get("background"))


@dataclass(frozen=True)
class AnswerOptions:
    """The form of an answer; nothing in it changes what is generated.

    echo_texts: per prompt the text to put in front, None without echo. num_logprobs: None without.
    return_tokens_as_token_ids: log-probabilities name tokens by their ids. drop_output: the prompt alone was asked for
    (echo with max_tokens 0). output: how a chat's reasoning and tool calls are separated from its text; None: it is
    all text. response: for /v1/responses, what its answer says of the request. message: the answer is one of
    /v1/messages. fills_context: its max_tokens was cut to what the context has room for.
    receipt: the answer has a receipt (openai/receipt.py). tokenizer: then, Tokenizer.digest; "" in older ones.
    """

    answer_id: str
    created: int
    model: str
    chat: bool
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo_texts: tuple[str, ...] | None = None
    num_logprobs: int | None = None
    prompt_logprobs: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    annotate: bool = False
    drop_output: bool = False
    output: OutputPlan | None = None
    response: ResponsePlan | None = None
    message: bool = False
    fills_context: bool = False
    receipt: bool = False
    tokenizer: str = ""


@dataclass(frozen=True)
class Prepared:
    """One ValidRequest per prompt; choice indices run over prompts first: prompt * n + choice.

    carrier: the trace that the caller is in. end_trace: called when the answer has ended; None: it is not traced.
    """

    requests: tuple[ValidRequest, ...]
    options: AnswerOptions
    carrier: Carrier = field(default=(), compare=False)
    end_trace: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    @property
    def in_background(self) -> bool:
        return self.options.response is not None and self.options.response.is_background

    def owned_by(self, owner: str, caller: str = "") -> Prepared:
        """Returns a copy for a server's caller; ValidRequest defines both arguments."""
        requests = tuple(replace(request, owner=owner, caller=caller) for request in self.requests)
        return replace(self, requests=requests)


class AnswerKind(enum.Enum):
    """The API and the form that the answer has."""

    COMPLETION = pb.ANSWER_KIND_COMPLETION
    CHAT = pb.ANSWER_KIND_CHAT
    GRPC = pb.ANSWER_KIND_GRPC
    RESPONSE = pb.ANSWER_KIND_RESPONSE
    MESSAGE = pb.ANSWER_KIND_MESSAGE


@dataclass(frozen=True)
class Wanted:
    """A client's request to continue an answer. seen: per choice, what it has. kind: None is any; choice: None is all.

    carrier: the trace that the client is in now. caller: as in ValidRequest.
    """

    request_id: str
    owner: str
    seen: Mapping[int, Seen]
    kind: AnswerKind | None = None
    choice: int | None = None
    carrier: Carrier = ()
    caller: str = ""
