"""Reasoning before an answer: what the prompt has begun of it, its budget, and grammars that hold from its end on."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence

from outrider.gateway.tool_calls.formats import OutputFormat, ReasoningFormat
from outrider.gateway.tool_calls.lark import Lark, expression_of
from outrider.shared.sampling_params import Grammar, GrammarKind, ThinkingBudget

_SPACE = "/[ \\t\\r\\n]{0,8}/"


class ReasoningState(enum.Enum):
    """Where the output begins."""

    OPEN = "open"  # in reasoning, which the prompt has begun
    CLOSED = "closed"  # behind it: the prompt holds an empty one, or its end
    UNKNOWN = "unknown"  # the model begins it, or does not


def reasoning_state(row: ReasoningFormat, prompt: str, continued: str | None = None) -> ReasoningState:
    """By the prompt's last characters alone: a user's message may hold the markers. continued: the text of the final
    message, where the model continues it.
    """
    if continued is not None:
        begin, end = continued.rfind(row.begin), continued.rfind(row.end)
        return ReasoningState.OPEN if begin > end else ReasoningState.CLOSED
    tail = prompt.rstrip()
    if tail.endswith(row.end):
        return ReasoningState.CLOSED
    return ReasoningState.OPEN if tail.endswith(row.begin) else ReasoningState.UNKNOWN


def with_reasoning(lark: Lark, row: ReasoningFormat | None, state: ReasoningState, answer: str) -> str:
    """The expression `answer`, behind the reasoning that may or must still come."""
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
    """The same grammar, for the answer alone. One that holds from the first token on stays as it is."""
    if state is ReasoningState.CLOSED and not row.answer_begin:
        return grammar
    lark = Lark(token_ids)
    answer = lark.rule(expression_of(grammar))
    return Grammar(GrammarKind.LARK, lark.source(with_reasoning(lark, row, state, answer)))


def can_bound(row: ReasoningFormat | None, token_ids: Mapping[str, int]) -> bool:
    """Whether reasoning ends with one special token, and begins with some: text can be cut into tokens in many ways."""
    return row is not None and row.end in token_ids and any(text in row.begin for text in token_ids)


def thinking_budget(
    max_tokens: int,
    output: OutputFormat,
    state: ReasoningState,
    token_ids: Mapping[str, int],
    encode: Callable[[str], Sequence[int]],
) -> ThinkingBudget:
    """Of an output that `can_bound` holds for. What ends reasoning is what does for the parser.

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
