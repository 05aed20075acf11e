"""The gRPC server: outrider.v1.Gateway. The HTTP server's checks, with errors as gRPC status codes.

To serve it: `rpc.start_server(host, port, lambda server: add_gateway_servicer(server, service), SERVICE_NAMES)`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from outrider.gateway.admission.auth import caller_of, owner_of
from outrider.gateway.admission.body_budget import INLINE_BYTES, BodyBudget, Held
from outrider.gateway.admission.quotas import metered
from outrider.gateway.openai.checks import (
    check_grammar,
    check_model,
    check_prompt,
    check_prompt_chars,
    check_speculation,
    check_stop,
    output_budget,
    predicted_tokens,
)
from outrider.gateway.openai.convert import DEFAULT_COMPLETION_TOKENS, REQUEST_ID
from outrider.gateway.request.answers import AnswerKind, AnswerOptions, Prepared, Wanted
from outrider.gateway.request.event_cursor import Seen
from outrider.gateway.request.tracing import ending
from outrider.gateway.request.types import GenerationUpdate, SpeculationSummary, ValidRequest
from outrider.gateway.servers.service import GatewayService
from outrider.shared import rpc
from outrider.shared.errors import InternalError, InvalidRequest
from outrider.shared.request_params import Speculation
from outrider.shared.tracing import Carrier, carrier_of
from outrider.shared.wire import from_message, logprob_to_wire, params_from_wire
from outrider.v1 import common_pb2 as common
from outrider.v1 import gateway_pb2 as pb
from outrider.v1 import gateway_pb2_grpc as pb_grpc

SERVICE_NAMES = (pb.DESCRIPTOR.services_by_name["Gateway"].full_name,)

Context = grpc.aio.ServicerContext[Any, Any]


def add_gateway_servicer(server: grpc.aio.Server, service: GatewayService) -> None:
    pb_grpc.add_GatewayServicer_to_server(GatewayServicer(service), server)


class GatewayServicer(pb_grpc.GatewayServicer):
    def __init__(self, service: GatewayService) -> None:
        self._service = service
        self._bodies = BodyBudget()  # for callers that no admission has looked at

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateReply]:
        """Ends with the generation; a cancelled call closes the generator."""
        try:
            valid = await self._valid(request, context)
            prepared = _prepared(valid, self._service).owned_by(owner_of(context), caller_of(context).name)
            begun = self._service.begin(AnswerKind.GRPC, replace(prepared, carrier=_carrier(context)))
            async with aclosing(self._replies(begun, 0, context)) as replies:
                async for reply in replies:
                    yield reply
        except Exception as error:
            await rpc.abort(context, error)

    async def _valid(self, request: pb.GenerateRequest, context: Context) -> ValidRequest:
        """Validates a request. Long texts are tokenized on a thread, a few at a time, so that streams keep flowing."""
        num_bytes = request.ByteSize()
        if num_bytes <= INLINE_BYTES:
            return valid_request(request, self._service)
        with closing(caller_of(context).held or Held(self._bodies)) as held:
            held.add_body(num_bytes)
            return await held.budget.on_thread(lambda: valid_request(request, self._service), num_bytes)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> AsyncIterator[pb.GenerateReply]:
        """One choice of a request from either server, from output index `base_len` on."""
        try:
            if request.base_len < 0:
                raise InvalidRequest(f"base_len must be at least 0, got {request.base_len}", param="base_len")
            seen = {request.choice: Seen(request.base_len, epoch=request.epoch if request.HasField("epoch") else None)}
            wanted = Wanted(
                request.request_id,
                owner_of(context),
                seen,
                choice=request.choice,
                carrier=_carrier(context),
                caller=caller_of(context).name,
            )
            resumed = await self._service.resume(wanted)
            async with aclosing(self._replies(resumed, request.base_len, context)) as replies:
                async for reply in replies:
                    yield reply
        except Exception as error:
            await rpc.abort(context, error)

    async def _replies(
        self, prepared: Prepared, num_seen: int, context: Context
    ) -> AsyncGenerator[pb.GenerateReply, None]:
        """Yields the replies after the tokens already seen of the one running choice."""
        [request] = [request for request in prepared.requests if request.starts]
        service = metered(self._service, caller_of(context).account)
        num_tokens = num_cached = 0
        finished = False
        with ending(prepared):
            async with aclosing(service.generate(request)) as updates:
                async for update in updates:
                    num_tokens += len(update.token_ids)
                    num_cached = max(num_cached, update.num_cached_tokens)
                    finished = update.finish_reason is not None
                    if num_tokens <= num_seen and not finished:
                        continue
                    reply = _reply(prepared.options.answer_id, update)
                    if finished:
                        reply.usage.prompt_tokens = len(request.prompt_token_ids)
                        reply.usage.completion_tokens = num_tokens
                        reply.usage.cached_tokens = num_cached
                    yield reply
        if not finished:
            raise InternalError("the output ended early")

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.ModelInfo:
        try:
            model = self._service.model
        except Exception as error:
            await rpc.abort(context, error)
        return pb.ModelInfo(
            model=model.name,
            max_model_len=model.max_model_len,
            draft_methods=model.draft_methods,
            version=self._service.version,
        )


def _carrier(context: Context) -> Carrier:
    pairs: Any = context.invocation_metadata() or ()  # typed as the client's kind of metadata, which has items()
    return carrier_of(pairs)


def valid_request(request: pb.GenerateRequest, service: GatewayService) -> ValidRequest:
    """Raises InvalidRequest or UnknownModel, as the HTTP server does."""
    model, limits = service.model, service.limits
    check_model(request.model or None, model)
    check_stop(request.stop, limits)
    if request.sampling_params.HasField("grammar"):
        check_grammar(request.sampling_params.grammar.text, model, limits, "grammar")
    speculation = from_message(Speculation, request.speculation)
    speculation.validate()
    if request.request_id and not REQUEST_ID.fullmatch(request.request_id):
        raise InvalidRequest("request_id must be 1 to 128 visible ASCII characters", param="request_id")
    prompt, param = _prompt(request, service)
    check_prompt(prompt, model, param)
    params = params_from_wire(request.sampling_params)
    max_tokens = output_budget(
        request.sampling_params.max_tokens or None, DEFAULT_COMPLETION_TOKENS, len(prompt), model, "max_tokens"
    )
    params = replace(params, max_tokens=max_tokens)
    params.validate(model.vocab_size)
    return ValidRequest(
        request_id=request.request_id or f"gen-{uuid.uuid4().hex}",
        prompt_token_ids=tuple(prompt),
        sampling_params=params,
        stop=tuple(request.stop),
        speculation=check_speculation(speculation, model),
        cache_salt=request.cache_salt,
        predicted_token_ids=predicted_tokens(request.prediction, service.tokenizer, model),
    )


def _prompt(request: pb.GenerateRequest, service: GatewayService) -> tuple[list[int], str]:
    """Returns the prompt's token ids, and the name of the field that held them."""
    match request.WhichOneof("input"):
        case "prompt":
            check_prompt_chars(request.prompt, service.tokenizer, service.model, "prompt")
            return service.tokenizer.encode(request.prompt), "prompt"
        case "prompt_token_ids":
            return list(request.prompt_token_ids.token_ids), "prompt_token_ids"
        case "messages":
            messages = [{"role": entry.role, "content": entry.content} for entry in request.messages.messages]
            if not messages:
                raise InvalidRequest("messages must not be empty", param="messages")
            text = service.tokenizer.apply_chat_template(messages)
            check_prompt_chars(text, service.tokenizer, service.model, "messages")
            return service.tokenizer.encode(text, add_special_tokens=False), "messages"
        case _:
            raise InvalidRequest("one of prompt, prompt_token_ids and messages is required", param="prompt")


def _prepared(valid: ValidRequest, service: GatewayService) -> Prepared:
    """Returns the request with the answer's form for GET /v1/streams/ID, in case it is resumed over HTTP."""
    options = AnswerOptions(
        answer_id=valid.request_id,
        created=int(time.time()),
        model=service.model.name,
        chat=False,
        stream=True,
        num_logprobs=valid.sampling_params.num_logprobs,
    )
    return Prepared((valid,), options)


def _reply(request_id: str, update: GenerationUpdate) -> pb.GenerateReply:
    return pb.GenerateReply(
        request_id=request_id,
        base_len=update.base_len,
        token_ids=update.token_ids,
        text=update.text,
        token_texts=update.token_texts,
        origins=[common.TokenOrigin.ValueType(origin) for origin in update.origins],
        logprobs=map(logprob_to_wire, update.logprobs),
        finish_reason=common.FinishReason.ValueType(update.finish_reason or 0),
        stop_reason="" if update.stop_reason is None else str(update.stop_reason),
        speculation=_speculation(update.speculation) if update.speculation is not None else None,
        epoch=update.epoch,
    )


def _speculation(summary: SpeculationSummary) -> pb.SpeculationMetrics:
    return pb.SpeculationMetrics(
        mean_acceptance_length=summary.mean_acceptance_length,
        draft_acceptance_rate=summary.draft_acceptance_rate,
        acceptance_histogram=summary.acceptance_histogram,
        num_spec_steps=summary.num_spec_steps,
        num_accepted_draft_tokens=summary.num_accepted_draft_tokens,
        num_draft_tokens=summary.num_draft_tokens,
        num_spec_tokens=summary.num_spec_tokens,
        saved_ms=summary.saved_us * 1e-3,
    )
