"""A chat's tools and reasoning: what the template gets, how the answer is parsed, and what a grammar must force.

Not here: the shape of the fields (tool_calls/fields.py), messages (tool_calls/messages.py), and the rows of model
families (tool_calls/formats.py).
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from outrider.gateway.openai.checks import check_grammar
from outrider.gateway.openai.schema import ChatCompletionRequest, ChatFields
from outrider.gateway.request.answers import Prepared
from outrider.gateway.request.served import Served
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.schemas.reading import argument_types
from outrider.gateway.tool_calls.call_grammar import CallGrammar, CallRule
from outrider.gateway.tool_calls.fields import ToolChoice, is_strict, parameters_of
from outrider.gateway.tool_calls.formats import NONE, OutputFormat, output_format
from outrider.gateway.tool_calls.lark import Lark, expression_of
from outrider.gateway.tool_calls.messages import template_messages, template_variables
from outrider.gateway.tool_calls.plan import OutputPlan
from outrider.gateway.tool_calls.reasoning import (
    ReasoningState,
    behind_reasoning,
    can_bound,
    reasoning_state,
    thinking_budget,
    with_reasoning,
)
from outrider.gateway.tool_calls.symbols import marker_tokens
from outrider.shared.errors import InvalidRequest
from outrider.shared.sampling_params import Grammar, GrammarKind, ThinkingBudget

log = logging.getLogger(__name__)

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# characters; longest grammar; bounds what the schemas of a request come to when definitions are repeated
_MAX_GRAMMAR_CHARS = 1_000_000
# notes; on tools' schemas, remembered so that each is logged once
_MAX_SAID = 1_000
# Part of the error that Llama 3's template raises for a message with two calls.
_ONE_CALL_A_TURN = "single tool-calls at once"


def chat_prompt(body: ChatFields, tokenizer: Tokenizer) -> str:
    """Returns the prompt's text. Raises InvalidRequest."""
    if body.add_generation_prompt and body.continue_final_message:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
        )
    effort = body.reasoning_effort
    if effort is not None and effort not in _EFFORTS:
        raise InvalidRequest(f"reasoning_effort must be one of {', '.join(_EFFORTS)}", param="reasoning_effort")
    source = tokenizer.tool_template_source if body.tools else tokenizer.chat_template_source
    return tokenizer.apply_chat_template(
        template_messages(body.messages, source or ""),
        body.add_generation_prompt,
        body.continue_final_message,
        template_variables(effort, body.chat_template_kwargs),
        body.tools,
    )


@dataclass(frozen=True)
class ChatPlan:
    """The plan for reading one request's output, and the calls that it must make. state: where the output begins.
    max_thinking_tokens: None means no limit.
    """

    output: OutputFormat
    state: ReasoningState
    options: OutputPlan
    choice: ToolChoice
    rules: tuple[CallRule, ...] = ()
    max_thinking_tokens: int | None = None

    @classmethod
    def of(cls, body: ChatCompletionRequest, served: Served, prompt: str) -> ChatPlan:
        """Raises InvalidRequest."""
        model = served.model
        choice = _choice(body)
        reads_calls = bool(body.tools) and choice.mode != "none"
        if reads_calls and model.tool_call_parser == NONE:
            raise _no_parser(served.tokenizer)
        output = output_format(model.reasoning_parser, model.tool_call_parser if reads_calls else NONE)
        state = ReasoningState.CLOSED
        if output.reasoning is not None:
            content = body.messages[-1]["content"] if body.continue_final_message else None
            state = reasoning_state(output.reasoning, prompt, content)
        template = served.tokenizer.tool_template_source or ""
        properties = {tool["function"]["name"]: argument_types(parameters_of(tool)) for tool in body.tools}
        options = OutputPlan(
            reasoning_parser=model.reasoning_parser,
            tool_call_parser=model.tool_call_parser if reads_calls else NONE,
            starts_in_reasoning=state is ReasoningState.OPEN,
            marker_tokens=marker_tokens(output.markers(), served.tokenizer.control_tokens),
            properties=json.dumps(properties) if reads_calls else "{}",
            parallel=body.parallel_tool_calls and choice.mode != "named" and _ONE_CALL_A_TURN not in template,
            is_named=choice.mode == "named",
            include_reasoning=body.include_reasoning,
            reasoning_field=model.reasoning_field,
            must_call=choice.mode in ("required", "named"),
        )
        rules = _rules(body, choice) if reads_calls else ()
        return cls(output, state, options, choice, rules, _max_thinking_tokens(body, output, served.tokenizer))

    def applied_to(self, prepared: Prepared, served: Served) -> Prepared:
        """The request with its output read as planned, and its grammar behind the reasoning. Raises InvalidRequest."""
        [request] = prepared.requests
        params = replace(
            request.sampling_params,
            grammar=self._grammar(request.sampling_params.grammar, served),
            thinking_budget=self._budget(served.tokenizer),
        )
        params.validate(served.model.vocab_size)
        if self.output == OutputFormat():
            return prepared
        return replace(
            prepared,
            requests=(
                replace(
                    request,
                    sampling_params=params,
                    marker_tokens=self.options.marker_tokens,
                    only_call=self.options if self.options.ends_with_call else None,
                ),
            ),
            options=replace(prepared.options, output=self.options),
        )

    def _budget(self, tokenizer: Tokenizer) -> ThinkingBudget | None:
        if self.max_thinking_tokens is None:
            return None
        encode = functools.partial(tokenizer.encode, add_special_tokens=False)
        return thinking_budget(self.max_thinking_tokens, self.output, self.state, tokenizer.control_tokens, encode)

    def _grammar(self, asked: Grammar | None, served: Served) -> Grammar | None:
        """Returns the output's grammar. asked: of response_format or structured_outputs, for the answer's text; there
        is no such text if a call is required.
        """
        reasoning, tokens = self.output.reasoning, served.tokenizer.control_tokens
        if self.output.calls is None or not (self.options.must_call or asked is not None or self._is_strict()):
            if asked is None or reasoning is None:
                return asked
            return behind_reasoning(asked, reasoning, self.state, tokens)
        check_grammar(json.dumps([rule.parameters for rule in self.rules]), served.model, served.limits, "tools")
        lark = Lark(tokens)
        calls = CallGrammar(lark, self.output.calls, self.rules, parallel=self.options.parallel)
        answer = self._answer(lark, calls, asked)
        _say_what_is_beyond(calls.beyond, {rule.name for rule in self.rules if rule.is_strict})
        source = lark.source(answer)
        if len(source) > _MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"tools: the grammar of their calls has {len(source)} characters, the maximum is {_MAX_GRAMMAR_CHARS}",
                param="tools",
            )
        return Grammar(GrammarKind.LARK, source)

    def _answer(self, lark: Lark, calls: CallGrammar, asked: Grammar | None) -> str:
        reasoning = self.output.reasoning
        if reasoning is not None and reasoning.answer_begin:  # the calls stand in place of it
            reasoning = replace(reasoning, answer_begin="")
        if self.options.must_call:
            answer = lark.rule(calls.forced())
        elif asked is not None:
            text = lark.rule(expression_of(asked))
            begin = self.output.reasoning.answer_begin if self.output.reasoning is not None else ""
            answer = lark.rule(f"{calls.forced()} | {lark.marker(begin)} {text}")
        else:
            answer = lark.rule(calls.optional())
        return with_reasoning(lark, reasoning, self.state, answer)

    def _is_strict(self) -> bool:
        """Returns whether calls that the model makes unprompted must follow a grammar."""
        return self.choice.names is not None or any(rule.is_strict for rule in self.rules)


def _choice(body: ChatCompletionRequest) -> ToolChoice:
    choice = body.tool_choice or ToolChoice("auto" if body.tools else "none")
    if not body.tools:
        if choice.mode in ("required", "named") or choice.names is not None:
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return ToolChoice("none")
    names = {tool["function"]["name"] for tool in body.tools}
    for name in choice.names or ():
        if name not in names:
            raise InvalidRequest(f"tool_choice names {name[:80]!r}, which is not among tools", param="tool_choice")
    return choice


def _max_thinking_tokens(body: ChatCompletionRequest, output: OutputFormat, tokenizer: Tokenizer) -> int | None:
    """Returns the budget; None for no limit, which may be sent as -1, as in vLLM. Raises InvalidRequest."""
    name, asked = "thinking_token_budget", body.thinking_token_budget
    if asked is None or asked == -1:
        return None
    if asked < 0:
        raise InvalidRequest(f"{name} must be at least 0, or -1 for no limit, got {asked}", param=name)
    if output.reasoning is None:
        raise InvalidRequest(
            f"{name}: the served model is not known to reason; start the gateway with --reasoning-parser", param=name
        )
    if not can_bound(output.reasoning, tokenizer.control_tokens):
        raise InvalidRequest(
            f"{name}: {output.reasoning.end!r}, which ends the served model's reasoning, is no token of its own; leave "
            "the field out",
            param=name,
        )
    return asked


def _rules(body: ChatCompletionRequest, choice: ToolChoice) -> tuple[CallRule, ...]:
    """Returns the rules of callable tools. Where nothing demands a schema, a call's arguments are any object."""
    must_call = choice.mode in ("required", "named")
    loose: dict[str, Any] = {"type": "object"}
    return tuple(
        CallRule(
            tool["function"]["name"],
            parameters_of(tool) if must_call or is_strict(tool) else loose,
            is_strict(tool),
        )
        for tool in body.tools
        if choice.names is None or tool["function"]["name"] in choice.names
    )


def _say_what_is_beyond(beyond: Sequence[tuple[str, str]], strict: Collection[str]) -> None:
    """Calls of tools that are strict must fit their schemas; of others, the operator learns once what may not."""
    for name, what in beyond:
        if name in strict:
            raise InvalidRequest(f"tools: {name}: a grammar cannot hold {what}; leave it out, or strict", param="tools")
        _say(name, what)


@lru_cache(maxsize=_MAX_SAID)
def _say(name: str, what: str) -> None:
    log.warning("calls of the tool %s may not fit its schema: a grammar cannot hold %s", name, what)


def _no_parser(tokenizer: Tokenizer) -> InvalidRequest:
    if "tools" in (tokenizer.tool_template_source or ""):
        return InvalidRequest(
            "tools: how the served model writes calls is not known; start the gateway with --tool-call-parser",
            param="tools",
        )
    return InvalidRequest(
        "tools: the served model's chat template takes no tools; to read and force calls all the same, start the "
        "gateway with --tool-call-parser",
        param="tools",
    )
