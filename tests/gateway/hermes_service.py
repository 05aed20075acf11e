"""A scripted gateway whose model thinks as Qwen 3 does and writes tool calls in the form of Hermes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gateway_script import Script, ScriptedService
from tool_forms import HERMES
from tool_tokenizers import tokenizer_of

from outrider.gateway.request.served import ServedModel


def service_of(text: str, commit_len: int = 3, **model: Any) -> ScriptedService:
    served = ServedModel("demo", 4096, 300, reasoning_parser="qwen3", tool_call_parser="hermes", created=1)
    return ScriptedService(tokenizer_of(HERMES), Script(text, commit_len), model=replace(served, **model))
