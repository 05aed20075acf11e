"""Reasoning before an answer: what the prompt has begun of it, its budget, and grammars that hold from its end on."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence

from outrider.gateway.tool_calls.formats import OutputFormat, ReasoningFormat
from outrider.gateway.tool_calls.lark import Lark, expression_of
from outrider.shared.sampling_params import Grammar, GrammarKind, ThinkingBudget

_SPACE = "/[ \\t\\r\\n]{0,8}/"


class ReasoningState(enum.Enum):
    """The state in which the output begins."""

    OPEN = "open"  # in reasoning, which the prompt has begun
    CLOSED = "closed"  # behind it: the prompt holds an empty one, or its end
    UNKNOWN = "unknown"  # the model begins it, or does not


def reasoning_state(row: ReasoningFormat, prompt: str, continued: str | None = None) -> ReasoningState:
    """Returns the state by the prompt's last characters only: a user's message may hold the markers. continued: the
    text of the final message, if the model continues it.
    """
    if continued is not None:
        begin, end = continued.rfind(row.begin), continued.rfind(row.end)
        return ReasoningState.OPEN if begin > end else ReasoningState.CLOSED
    tail = prompt.rstrip()
    if tail.endswith(row.end):
        return ReasoningState.CLOSED
    return ReasoningState.OPEN if tail.endswith(row.begin) else ReasoningState.UNKNOWN


def with_reasoning(lark: Lark, row: ReasoningFormat | None, state: ReasoningState, answer: str) -> str:
    """Returns the expression `answer` behind the reasoning that may or must still come."""
    if row is None:
        return answer
    answer = f"{lark.marker(row.answer_begin)} {answer}" if row.answer_begin else answer
    if state is ReasoningState.CLOSED:
        return answer
    between = lark.marker(row.after) if row.after else lark.rule(_SPACE)
    rest = lark.text_until(row.end)
    if state is ReasoningState.OPEN:
        return f"{rest} {between} {answer}"
    return f"({lark.marker(row.begin)} {rest} {between})? {answer}"


def behind_reasoning(
    grammar: Grammar, row: ReasoningFormat, state: ReasoningState, token_ids: Mapping[str, int]
) -> Grammar:
    """Returns the grammar behind the reasoning that may come; unchanged if the answer begins with the first token."""
    if state is ReasoningState.CLOSED and not row.answer_begin:
        return grammar
    lark = Lark(token_ids)
    answer = lark.rule(expression_of(grammar))
    return Grammar(GrammarKind.LARK, lark.source(with_reasoning(lark, row, state, answer)))


def can_bound(row: ReasoningFormat | None, token_ids: Mapping[str, int]) -> bool:
    """Returns whether reasoning ends with one special token and its begin marker has one: other text can be cut into
    tokens in many ways.
    """
    return row is not None and row.end in token_ids and any(text in row.begin for text in token_ids)


def thinking_budget(
    max_tokens: int,
    output: OutputFormat,
    state: ReasoningState,
    token_ids: Mapping[str, int],
    encode: Callable[[str], Sequence[int]],
) -> ThinkingBudget:
    """Returns the budget for an output for which `can_bound` is true. Reasoning ends where it ends for the parser.

    token_ids: of the special tokens. encode: a text to token ids, none added.
    """
    row = output.reasoning
    if row is None:
        raise ValueError("an output without reasoning has no budget for it")
    begin_chars = max(row.begin.rfind(text) + len(text) for text in token_ids if text in row.begin)
    calls = output.calls
    call_markers = () if calls is None else (calls.begin, *calls.around())
    starts = [[text for text in token_ids if text and marker.startswith(text)] for marker in call_markers]
    return ThinkingBudget(
        max_tokens,
        token_ids[row.end],
        tuple(encode(row.begin[:begin_chars])),
        tuple(sorted({token_ids[max(texts, key=len)] for texts in starts if texts})),
        state is ReasoningState.OPEN,
    )
