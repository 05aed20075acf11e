"""One token's text is one delta, with the token's log-probability, wherever markers begin or end in it."""

from __future__ import annotations

from outrider.gateway.openai.answer_types import ChatTokenLogprob
from outrider.gateway.request.answers import AnswerOptions
from outrider.gateway.responses.output_items import OutputItems
from outrider.gateway.tool_calls.plan import OutputPlan


def deltas_of(texts: list[str], plan: OutputPlan) -> list[tuple[str, list[str]]]:
    """Of the answer: each delta, and the tokens whose log-probabilities came with it."""
    items = OutputItems(AnswerOptions("resp-1", 0, "demo", chat=True, output=plan))
    events = []
    for text in texts:
        entry: ChatTokenLogprob = {"token": text, "logprob": -1.0, "bytes": list(text.encode()), "top_logprobs": []}
        events += items.push(text, [entry])
    events += items.finish(is_complete=True)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    return [(event["delta"], [entry["token"] for entry in event["logprobs"]]) for event in deltas]


def test_a_token_that_might_have_begun_a_call_comes_whole() -> None:
    plan = OutputPlan(tool_call_parser="hermes")
    assert deltas_of(["a <b", " <", "c"], plan) == [("a <b", ["a <b"]), (" <c", [" <", "c"])]


def test_a_token_that_ends_the_reasoning_and_begins_the_answer() -> None:
    plan = OutputPlan(reasoning_parser="qwen3", starts_in_reasoning=True)
    shown = deltas_of(["Hm", "</think>Y", "es"], plan)
    assert shown == [("Y", ["</think>Y"]), ("es", ["es"])]
