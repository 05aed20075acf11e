"""Measures a head that learns while it serves: traffic turns from one kind of text to another, and back.

    python -m benchmarks.learning models/demo-target --head runs/code-head --before code.jsonl --after docs.jsonl

Each arm is a fresh stack that serves the same prompts: `before` for a while, then `after`, then more of `before`; no
prompt twice as long as there are enough. An arm is a share of a core for the learner (0: the head stays as it is) or,
with --oracle, another head that was trained on `after`. Per window of seconds: tokens/s, and tokens a round of those
requests. At the end the arms' answers to the same prompts are compared byte for byte: exit code 1 where they differ.
Prompts: lines with "prompt" or "messages".
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import httpx
from matplotlib.figure import Figure

from benchmarks.arms import add_options, arm_stack, ask, say_whether_same, text_of
from benchmarks.records import save_rows
from benchmarks.screen import console, say, table

# prompts of each kind whose answers are compared between arms
_NUM_COMPARED = 8
# windows; the end of a phase by which it is judged
_LAST = 3


@dataclass(frozen=True)
class Window:
    """What ended within a window. start_s: from the arm's first request."""

    phase: str
    start_s: float
    tokens_per_s: float
    tokens_a_round: float


@dataclass
class Arm:
    """One stack's run. share: of a core that the learner may take; 0: none learns."""

    name: str
    head: str
    share: float
    windows: list[Window] = field(default_factory=list)
    learning: dict[str, Any] | None = None
    answers: list[str] = field(default_factory=list)

    def of(self, phase: str) -> list[Window]:
        return [window for window in self.windows if window.phase == phase]

    def end_of(self, phase: str) -> float:
        """Tokens a round at the end of a phase."""
        return fmean(window.tokens_a_round for window in self.of(phase)[-_LAST:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--head", required=True, help="trained on text like `before` alone")
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("--oracle", default="", help="a head of the same shape, trained on text like `after`")
    parser.add_argument("--shares", default="0,0.25", help="of a core, comma-separated")
    parser.add_argument("--minutes", nargs=2, type=float, default=(1.0, 10.0), metavar=("BEFORE", "AFTER"))
    parser.add_argument("--still-minutes", type=float, help="AFTER of arms whose head stays as it is; default: AFTER")
    parser.add_argument("--pause", type=float, default=0.0, help="minutes without traffic in the middle of AFTER")
    parser.add_argument("--window", type=float, default=30.0, help="seconds")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--plot", type=Path)
    add_options(parser)
    arguments = parser.parse_args()
    prompts = [
        [json.loads(line) for line in path.read_text().splitlines()] for path in (arguments.before, arguments.after)
    ]
    shares = [float(share) for share in arguments.shares.split(",")]
    arms = [Arm(f"learning, {share:g} of a core" if share else "off", arguments.head, share) for share in shares]
    arms += [Arm("oracle", arguments.oracle, 0.0)] if arguments.oracle else []
    for arm in arms:
        say(arm.name)
        _run(arm, prompts, arguments)
    _print(arms)
    same = all(arm.answers == arms[0].answers for arm in arms)
    say_whether_same(same)
    save_rows("learning", [_row(arm, arguments) for arm in arms])
    if arguments.plot:
        _draw(arms, arguments.plot)
    raise SystemExit(0 if same else 1)


def _run(arm: Arm, prompts: Sequence[Sequence[dict[str, Any]]], arguments: argparse.Namespace) -> None:
    learn = ("--learn", "shared", "--learn-share", str(arm.share)) if arm.share else ()
    before_s, after_s = (60 * minutes for minutes in arguments.minutes)
    if not arm.share and arguments.still_minutes is not None:
        after_s = 60 * arguments.still_minutes
    before, after = map(itertools.cycle, prompts)
    with arm_stack(arguments.model, arm.head, learn) as client:
        began = time.monotonic()
        _serve(arm, client, "before", before, before_s, began, arguments)
        if arguments.pause and arm.share:
            _serve(arm, client, "after", after, after_s / 2, began, arguments)
            time.sleep(60 * arguments.pause)
            _serve(arm, client, "after", after, after_s / 2, began, arguments)
        else:
            _serve(arm, client, "after", after, after_s, began, arguments)
        _serve(arm, client, "before again", before, before_s, began, arguments)
        compared = [prompt for texts in prompts for prompt in texts[:_NUM_COMPARED]]
        arm.answers = [text_of(ask(client, prompt, arguments, temperature=0.0)) for prompt in compared]
        arm.learning = client.get("/fleet").raise_for_status().json()["verifiers"][0]["learning"]


def _serve(
    arm: Arm,
    client: httpx.Client,
    phase: str,
    prompts: Iterator[dict[str, Any]],
    seconds: float,
    began: float,
    arguments: argparse.Namespace,
) -> None:
    """Keeps the streams busy for the phase and adds its windows, which begin with it."""
    ended: list[tuple[float, int, int, int]] = []
    until = time.monotonic() + seconds
    lock = threading.Lock()

    def stream() -> None:
        while time.monotonic() < until:
            with lock:
                prompt = next(prompts)
            answer = ask(client, prompt, arguments, temperature=arguments.temperature)
            drafted = answer["metrics"]["speculative_decoding"]
            numbers = (drafted["num_spec_steps"], drafted["num_accepted_draft_tokens"])
            with lock:
                ended.append((time.monotonic(), answer["usage"]["completion_tokens"], *numbers))

    threads = [threading.Thread(target=stream) for _ in range(arguments.streams)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(max(1, int(seconds // arguments.window))):
        first = start + number * arguments.window
        here = [each for each in ended if first <= each[0] < first + arguments.window]
        rounds, accepted = sum(each[2] for each in here), sum(each[3] for each in here)
        if rounds:
            rate = sum(each[1] for each in here) / arguments.window
            arm.windows.append(Window(phase, first - began, rate, 1 + accepted / rounds))
            say(f"{arm.name}, {phase}, {first - began:.0f} s: {rate:.0f} tokens/s, {1 + accepted / rounds:.2f} a round")


def _time_to_gain(arm: Arm, off: Arm) -> float | None:
    """Seconds of `after` until a window beats the off arm's mean by two standard errors, and the rest does too.

    None: that did not happen, or too late to tell.
    """
    reference = [window.tokens_a_round for window in off.of("after")]
    threshold = fmean(reference) + 2 * stdev(reference) / len(reference) ** 0.5
    windows = arm.of("after")
    for place in range(len(windows) - _LAST + 1):
        rest = [window.tokens_a_round for window in windows[place:]]
        if rest[0] > threshold and fmean(rest) > threshold:
            return windows[place].start_s - windows[0].start_s
    return None


def _print(arms: Sequence[Arm]) -> None:
    made = table(
        "arm", "before", "after, first", "after, last", "before again", "tokens/s, last", "time to gain", "heads"
    )
    off = arms[0]
    for arm in arms:
        after = arm.of("after")
        gained = _time_to_gain(arm, off) if arm is not off and len(off.of("after")) > 1 else None
        learning = arm.learning
        heads = (
            "{num_taken} taken, {num_refused} refused, {num_rolled_back} back".format(**learning) if learning else ""
        )
        made.add_row(
            arm.name,
            f"{arm.end_of('before'):.2f}",
            f"{fmean(window.tokens_a_round for window in after[:_LAST]):.2f}",
            f"{arm.end_of('after'):.2f}",
            f"{arm.end_of('before again'):.2f}",
            f"{fmean(window.tokens_per_s for window in after[-_LAST:]):.0f}",
            "" if gained is None else f"{gained:.0f} s",
            heads,
        )
    console.print(made)


def _row(arm: Arm, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": arguments.model,
        "arm": arm.name,
        "streams": arguments.streams,
        "temperature": arguments.temperature,
        "windows": [vars(window) for window in arm.windows],
        "learning": arm.learning,
    }


def _draw(arms: Sequence[Arm], path: Path) -> None:
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for arm in arms:
        axes.plot(
            [window.start_s / 60 for window in arm.windows],
            [window.tokens_a_round for window in arm.windows],
            marker=".",
            label=arm.name,
        )
    longest = max(arms, key=lambda arm: len(arm.windows)).windows
    for phase in ("after", "before again"):
        axes.axvline(next(window.start_s for window in longest if window.phase == phase) / 60, color="0.7", linewidth=1)
    axes.set_xlabel("minutes")
    axes.set_ylabel("tokens a round")
    axes.legend()
    figure.savefig(path, dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main()
