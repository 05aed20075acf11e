"""Measures several heads for one target: does each kind of text find its head, and how near does it come to the best?

    python -m benchmarks.several_heads models/demo-target --head code=runs/code --head docs=runs/docs \\
        --traffic code=code.jsonl --traffic docs=docs.jsonl

An arm is a fresh stack: each head alone, then all of them. A stream per kind of text serves its prompts with a salt of
its own, all at the same time; greedy, so that every arm writes the same bytes, which is checked: exit code 1 where they
differ. The table has tokens a round behind the first --learned tokens of each kind. Prompts: lines with "prompt" or
"messages".
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.arms import add_options, arm_stack, ask, say_whether_same, text_of
from benchmarks.records import save_rows
from benchmarks.screen import console, say, table


@dataclass(frozen=True)
class Answer:
    text: str
    num_tokens: int
    num_rounds: int
    num_accepted: int


@dataclass
class Arm:
    """One stack's run, and its answers by kind of text, in order."""

    name: str
    draft_model: str
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    def tokens_a_round(self, kind: str, num_learned: int) -> tuple[float, float]:
        """Until `num_learned` tokens of the kind have come, and behind them."""
        num_tokens, parts = 0, ([0, 0], [0, 0])
        for answer in self.answers[kind]:
            part = parts[num_tokens >= num_learned]
            part[0] += answer.num_rounds
            part[1] += answer.num_accepted
            num_tokens += answer.num_tokens
        first, rest = (1 + accepted / max(1, rounds) for rounds, accepted in parts)
        return first, rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--head", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--traffic", action="append", required=True, metavar="KIND=FILE")
    parser.add_argument("--requests", type=int, default=60, help="of each kind")
    parser.add_argument("--learned", type=int, default=4000, help="tokens")
    add_options(parser)
    arguments = parser.parse_args()
    traffic = {}
    for entry in arguments.traffic:
        kind, _, path = entry.partition("=")
        traffic[kind] = [json.loads(line) for line in Path(path).read_text().splitlines()[: arguments.requests]]
    arms = [Arm(entry.partition("=")[0], entry.partition("=")[2]) for entry in arguments.head]
    arms.append(Arm("all", ",".join(arguments.head)))
    for arm in arms:
        _run(arm, traffic, arguments)
    _print(arms, traffic, arguments.learned)
    texts = [{kind: [answer.text for answer in found] for kind, found in arm.answers.items()} for arm in arms]
    same = all(found == texts[0] for found in texts)
    say_whether_same(same)
    save_rows("several_heads", [_row(arm, kind, arguments) for arm in arms for kind in traffic])
    raise SystemExit(0 if same else 1)


def _run(arm: Arm, traffic: Mapping[str, Sequence[dict[str, Any]]], arguments: argparse.Namespace) -> None:
    def stream(client: httpx.Client, kind: str) -> None:
        for prompt in traffic[kind]:
            arm.answers[kind].append(_answer(ask(client, prompt, arguments, temperature=0.0, cache_salt=kind)))

    with arm_stack(arguments.model, arm.draft_model) as client:
        arm.answers = {kind: [] for kind in traffic}
        threads = [threading.Thread(target=stream, args=(client, kind)) for kind in traffic]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        fleet = client.get("/fleet").raise_for_status().json()
    for method in fleet["verifiers"][0]["methods"]:
        for head in method["heads"]:
            say(f"{head['name']}: {head['num_sessions']} sessions")
    rates = {kind: arm.tokens_a_round(kind, arguments.learned) for kind in traffic}
    say(f"{arm.name}: " + ", ".join(f"{kind} {first:.2f}, then {rest:.2f}" for kind, (first, rest) in rates.items()))


def _answer(answer: Mapping[str, Any]) -> Answer:
    drafted = answer["metrics"]["speculative_decoding"]
    return Answer(
        text_of(answer),
        answer["usage"]["completion_tokens"],
        drafted["num_spec_steps"],
        drafted["num_accepted_draft_tokens"],
    )


def _print(arms: Sequence[Arm], kinds: Mapping[str, object], num_learned: int) -> None:
    *single, together = arms
    made = table("text", *(f"{arm.name} alone" for arm in single), "all, at first", "all, then", "of the best")
    for kind in kinds:
        alone = [arm.tokens_a_round(kind, num_learned)[1] for arm in single]
        first, rest = together.tokens_a_round(kind, num_learned)
        rates = [f"{rate:.2f}" for rate in (*alone, first, rest)]
        made.add_row(kind, *rates, f"{rest / max(alone):.3f}")
    console.print(made)


def _row(arm: Arm, kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    first, rest = arm.tokens_a_round(kind, arguments.learned)
    return {
        "model": arguments.model,
        "heads": arm.name,
        "text": kind,
        "num_requests": len(arm.answers[kind]),
        "tokens_a_round_at_first": first,
        "tokens_a_round_then": rest,
    }


if __name__ == "__main__":
    main()
