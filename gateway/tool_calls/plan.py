"""The inputs other than its tokens that shape a chat's answer, so that any gateway can continue it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.gateway.tool_calls.formats import NONE, OutputFormat, output_format
from outrider.gateway.tool_calls.parser import OutputParser, Tools
from outrider.gateway.tool_calls.symbols import Symbols


@dataclass(frozen=True)
class OutputPlan:
    """The parsers' names; "none" reads nothing of the kind.

    marker_tokens: the special tokens that the text shows as symbols. properties: JSON, per tool the schema of each of
    its arguments. parallel: false ends the output with its first call. is_named: the request named the tool to call.
    must_call: the request demands a call, so that a grammar allows no other text.
    """

    reasoning_parser: str = NONE
    tool_call_parser: str = NONE
    starts_in_reasoning: bool = False
    marker_tokens: tuple[str, ...] = ()
    properties: str = "{}"
    parallel: bool = True
    is_named: bool = False
    include_reasoning: bool = True
    reasoning_field: str = "reasoning"
    must_call: bool = False

    def output_format(self) -> OutputFormat:
        return output_format(self.reasoning_parser, self.tool_call_parser)

    def symbols(self) -> Symbols:
        return Symbols(self.marker_tokens)

    @property
    def ends_with_call(self) -> bool:
        return self.tool_call_parser != NONE and not self.parallel

    def parser(self) -> OutputParser:
        tools = Tools(json.loads(self.properties), self.parallel, self.must_call)
        return OutputParser(self.output_format(), self.symbols(), tools, starts_in_reasoning=self.starts_in_reasoning)


class ReasoningTokens:
    """Counts the tokens of the reasoning of a request's choices, its markers included."""

    def __init__(self, plan: OutputPlan) -> None:
        self._plan = plan
        self._parsers: dict[int, OutputParser] = {}
        self.count = 0

    def add(self, choice: int, token_texts: Sequence[str]) -> None:
        """Counts an update's tokens. token_texts: what each token of the choice added to its text, in order."""
        parser = self._parsers.get(choice)
        if parser is None:
            parser = self._parsers[choice] = self._plan.parser()
        for text in token_texts:
            was_reasoning = parser.in_reasoning
            parser.push(text)
            self.count += was_reasoning or parser.in_reasoning
