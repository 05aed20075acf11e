"""Chat templates: Jinja in a sandbox, rendered as Hugging Face does.

The environment (trim_blocks, lstrip_blocks, loop controls, tojson, raise_exception, strftime_now, `generation` blocks
as plain text) follows transformers/utils/chat_template_utils.py, so that a template gives the same text. Not
here: tokenizing the result, and messages with tool calls (tool_calls/messages.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.shared.errors import ConfigError, InvalidRequest

# Marks the end of the message to be continued; the template's output after it is cut off.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# A conversation with system messages in all places.
PROBE = tuple(
    {"role": role, "content": f"{role} probe {place}"}
    for place, role in enumerate(("system", "system", "user", "assistant", "system", "user"))
)
_RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

Message = Mapping[str, Any]


class ChatTemplate:
    """One compiled template. special_tokens ("bos_token": "<s>", ...) are variables of the template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ConfigError when the template does not compile: the checkpoint's fault, not the caller's."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Returns the prompt text. Raises InvalidRequest (param "messages") when the template refuses the messages.

        continue_final_message: leaves the last message open for the model to continue.
        """
        extra = dict(variables or {})
        if not (continue_final_message and messages and _is_system(messages[-1])):  # that one must stay the last
            messages = self._with_system_in_place(messages)
        reserved = sorted(_RESERVED_NAMES & extra.keys())
        if reserved:
            raise InvalidRequest(
                f"chat_template_kwargs must not set {reserved[0]}, it has its own field",
                param="chat_template_kwargs",
            )
        chat = [dict(message) for message in messages]
        if continue_final_message:
            _mark_final_message(chat)
        names = {
            **extra,
            "messages": chat,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._render(names)
        # A template is the checkpoint's program on the caller's data: any error (a missing key, text plus None) means
        # that these messages do not fit it.
        except Exception as error:
            raise InvalidRequest(f"messages do not fit the model's chat template: {error}", param="messages") from error
        return _cut_at_tag(text) if continue_final_message else text

    def _render(self, names: Mapping[str, Any]) -> str:
        # Passed as one dictionary: a variable named "self" must not collide with an argument of render.
        return self._template.render({**self._special_tokens, **names})

    def _with_system_in_place(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Joins all system messages in order into the first, where the template shows no others."""
        system = [message for message in messages if _is_system(message)]
        if system in ([], list(messages[:1])) or self._takes_later_system:
            return messages
        text = "\n\n".join(str(message.get("content", "")) for message in system)
        return [{**system[0], "content": text}, *(message for message in messages if not _is_system(message))]

    @cached_property
    def _takes_later_system(self) -> bool:
        """True if the template shows later system messages in place. Qwen3.5's refuses them; others skip them."""
        try:
            text = self._render({"messages": PROBE, "tools": None, "documents": None, "add_generation_prompt": True})
        except Exception:  # whatever it is: the messages do not fit
            return False
        places = [text.find(message["content"]) for message in PROBE]
        return -1 not in places and places == sorted(places)


def _is_system(message: Message) -> bool:
    return message.get("role") == "system"


def _mark_final_message(chat: list[dict[str, Any]]) -> None:
    content = chat[-1].get("content") if chat else None
    if not isinstance(content, str):
        raise InvalidRequest("continue_final_message needs a last message with text", param="messages")
    chat[-1]["content"] = content + _CONTINUE_TAG


def _cut_at_tag(text: str) -> str:
    position = text.rfind(_CONTINUE_TAG.strip())
    if position < 0:
        raise InvalidRequest(
            "continue_final_message is set, but the chat template omits the last message", param="messages"
        )
    if text[position : position + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return text[:position]
    return text[:position].rstrip()  # the template trims messages, so trim the text before the tag too


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training masks; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it without ClassVar)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
