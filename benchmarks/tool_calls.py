"""Tokens a round inside tool calls, with and without what the request itself says of them.

Asks a running stack for calls, forced and of the model's own accord, drafted by `ngram` and `suffix`. The same outputs
are then replayed round by round: by the lookup alone, which shows what the grammar adds, and with a skeleton of every
tool's call in front of the prompt. A replay needs no model: its rounds are counted, not timed.

    outrider serve FILE.gguf
    python -m benchmarks.tool_calls
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import httpx
import typer

from benchmarks.records import save_rows
from benchmarks.screen import console, table
from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.ngram import NgramMethod
from outrider.drafting.methods.suffix import SuffixMethod, SuffixSettings
from outrider.drafting.session import DraftSession
from outrider.shared.messages import DraftStep, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode

# seconds; of one answer, on a machine that is busy otherwise
_TIMEOUT_S = 1500.0
_MAX_TOKENS = 96
_NUM_DRAFT_TOKENS = 5
_LAWS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 7})
# As the services are set by default, but for what earlier outputs would tell.
METHODS: dict[str, Callable[[], DraftMethod]] = {
    "ngram": lambda: NgramMethod(prompt_lookup_min=1, prompt_lookup_max=5),
    "suffix": lambda: SuffixMethod(SuffixSettings(24, 0, 1_000_000, 1.0, 0.1)),
}
_CHOICES = {"forced": "required", "own accord": "auto"}


def _tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_TEXT = {"type": "string"}
TOOLS = [
    _tool("get_weather", "Weather of a city.", city=_TEXT, unit={"type": "string", "enum": ["celsius", "fahrenheit"]}),
    _tool("calculate", "Value of an arithmetic expression.", expression=_TEXT),
    _tool("send_email", "Send an email.", recipient=_TEXT, subject=_TEXT, body=_TEXT),
    _tool("search_files", "Find files by a pattern.", pattern=_TEXT, folder=_TEXT, max_results={"type": "integer"}),
]
QUESTIONS = (
    "What is the weather in Paris, in celsius?",
    "What is 345 plus 678?",
    "Send an email to Anna about the meeting on Monday.",
    "Find all Python files in the folder src, at most ten.",
    "How warm is it in Tokyo, in fahrenheit?",
    "Multiply 12 by 34.",
    "Write to bob@example.com that the build is broken.",
    "Which text files are in docs?",
)


def main(
    url: Annotated[str, typer.Option(help="Of a gateway, all of whose methods are served.")] = "http://127.0.0.1:8000",
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/tool_calls.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.tool_calls --url http://127.0.0.1:8000"""
    rows = asyncio.run(_rows(url))
    shown = table("calls", "method", "number", "tokens", "a round", "by the lookup alone", "skeletons in front")
    for row in rows:
        means = (f"{row[name]:.2f}" for name in ("tokens_per_round", "alone", "with_skeletons"))
        shown.add_row(row["kind"], row["method"], str(row["num_calls"]), str(row["num_tokens"]), *means)
    console.print(shown)
    if save:
        console.print(f"rows appended to {save_rows('tool_calls', rows)}")


async def _rows(url: str) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as http:
        text = "".join(skeleton(tool["function"]) for tool in TOOLS)
        in_front = (await _post(http, "/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"]
        rows, run = [], uuid.uuid4().hex
        for kind, choice in _CHOICES.items():
            for method in METHODS:
                asked = [_asked(question, law, method, choice, run) for law in _LAWS for question in QUESTIONS]
                answers = await asyncio.gather(*(_post(http, "/v1/chat/completions", body) for body in asked))
                rows.append({"kind": kind, "method": method, **figures(method, answers, in_front)})
    return rows


def skeleton(function: dict[str, Any]) -> str:
    """A call as Hermes' format has it, its arguments left empty."""
    arguments = dict.fromkeys(function["parameters"]["properties"], "")
    return f"<tool_call>\n{json.dumps({'name': function['name'], 'arguments': arguments})}\n</tool_call>\n"


def _asked(question: str, law: dict[str, Any], method: str, choice: str, run: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": _MAX_TOKENS,
        "return_token_ids": True,
        # No suffix draft sees the output of another run.
        "cache_salt": f"{run} {question} {law} {choice} {method}",
        "speculation": {"method": method, "num_speculative_tokens": _NUM_DRAFT_TOKENS, "annotate": True},
        **law,
    }


async def _post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = await http.post(path, json=body)
    reply.raise_for_status()
    answer: dict[str, Any] = reply.json()
    return answer


def figures(method: str, answers: Sequence[dict[str, Any]], in_front: Sequence[int]) -> dict[str, Any]:
    """Means over the answers that are a call. in_front: tokens of the skeletons."""
    calls = [answer for answer in answers if answer["choices"][0]["message"].get("tool_calls")]
    outputs = [(answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) for answer in calls]
    num_tokens = sum(len(output) for _, output in outputs)

    def a_round(num_rounds: int) -> float:
        return num_tokens / num_rounds if num_rounds else 0.0

    return {
        "num_calls": len(calls),
        "num_tokens": num_tokens,
        "tokens_per_round": a_round(sum(len(answer["choices"][0]["outrider"]["rounds"]) for answer in calls)),
        "alone": a_round(sum(num_rounds_of(METHODS[method](), *output) for output in outputs)),
        "with_skeletons": a_round(
            sum(num_rounds_of(METHODS[method](), [*in_front, *prompt], output) for prompt, output in outputs)
        ),
    }


def num_rounds_of(method: DraftMethod, prompt: Sequence[int], output: Sequence[int]) -> int:
    """Rounds in which `method`, without a grammar, has the output verified, _NUM_DRAFT_TOKENS tokens a draft."""
    spec = SessionSpec("r", 0, tuple(prompt), (), SamplingParams(), SpeculationMode.EXACT, 0)
    session = DraftSession(spec, list(prompt), lambda *_reply: None)
    method.open(session)
    num_rounds = num_done = 0
    new: tuple[int, ...] = ()
    while num_done < len(output):
        session.report(DraftStep(0, num_done - len(new), new, _NUM_DRAFT_TOKENS))
        (proposal,) = method.propose([session])
        num_right = 0
        for drafted, written in zip(proposal.token_ids, output[num_done:], strict=False):
            if drafted != written:
                break
            num_right += 1
        new = tuple(output[num_done : num_done + num_right + 1])
        num_done += len(new)
        num_rounds += 1
    method.close(session)
    return num_rounds


if __name__ == "__main__":
    typer.run(main)
