"""Plans the time of `outrider train auto`, from rates that were measured on this machine.

Not here: measuring the rates (pipeline.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.training.auto.config import LEAST_QUESTIONS
from outrider.training.run_config import OptimizationConfig

# tokens; longest window of the training
SEQ_LEN = 512
# shares; of the time left before the answers are written, for them and the training, and of that left afterwards, for
# the training; the rest is for starts and the last measurement
_WORK_SHARE, _TRAINING_SHARE = 0.9, 0.85
# epochs; planned: on new text a head stops gaining long before it does on its own rows, so time goes to text first, and
# a second reading costs no writing
_EPOCHS = 2.0
# epochs; more read the same answers again for little
_MOST_EPOCHS = 4.0
_TEMPERATURES = 2


@dataclass(frozen=True)
class Rates:
    """Measured by the probes.

    written, trained: tokens per second, of the engine with all streams and of a training step. turn_tokens: of a
    sampled user turn; 0: prompts are given. answer_tokens: of an answer. prompts_per_turn: turns end, and differ.
    """

    written: float
    trained: float
    turn_tokens: float
    prompt_tokens: float
    answer_tokens: float
    prompts_per_turn: float


@dataclass(frozen=True)
class Plan:
    """num_turns: to sample, or questions to take from the file. training_tokens: read by all steps."""

    num_turns: int
    num_questions: int
    writing_s: float
    training_s: float
    training_tokens: float


def plan(rates: Rates, left_s: float, num_given: int | None) -> Plan:
    """Plans what fits into `left_s` seconds. num_given: prompts of the file; None: they are sampled."""
    per_turn = rates.prompts_per_turn * _TEMPERATURES
    writing_s = (rates.turn_tokens + per_turn * rates.answer_tokens) / rates.written
    reading_s = per_turn * (rates.prompt_tokens + rates.answer_tokens) / rates.trained
    num_fitting = int(_WORK_SHARE * left_s / (writing_s + _EPOCHS * reading_s))
    num_turns = max(num_fitting, round(LEAST_QUESTIONS / rates.prompts_per_turn))
    if num_given is not None:
        num_turns = min(num_turns, num_given)
    num_questions = max(1, int(num_turns * rates.prompts_per_turn))
    training_s = min(_WORK_SHARE * left_s - num_turns * writing_s, _MOST_EPOCHS * num_turns * reading_s)
    training_s = max(0.0, training_s)
    return Plan(num_turns, num_questions, num_turns * writing_s, training_s, training_s * rates.trained)


def num_steps(data: Path, rates: Rates, left_s: float, batch_size: int = OptimizationConfig.batch_size) -> int:
    """Optimizer steps over the rows of `data` that fit into the training's part of `left_s` seconds."""
    lengths = [
        len(row["prompt_token_ids"]) + len(row["token_ids"])
        for row in map(json.loads, data.read_text(encoding="utf-8").splitlines())
    ]
    num_windows = sum(-(-length // SEQ_LEN) for length in lengths)
    batch_tokens = batch_size * sum(lengths) / max(1, num_windows)
    by_time = _TRAINING_SHARE * left_s * rates.trained / max(1.0, batch_tokens)
    return max(1, int(min(by_time, _MOST_EPOCHS * num_windows / batch_size)))


def first_line(left_s: float) -> str:
    """Returns what is said before the machine's speed is known."""
    return (
        f"at most {_minutes(left_s)} in all (--hours): this machine's speed is measured first, then the plan is said; "
        "stop when you like, the same command goes on from there"
    )


def lines(rates: Rates, found: Plan, left_s: float) -> Sequence[str]:
    """Returns what is said beforehand."""
    return (
        f"this machine writes {rates.written:,.0f} tokens/s of answers and trains on {rates.trained:,.0f} tokens/s",
        f"about {_minutes(found.writing_s)} for {found.num_questions:,} questions with two answers each, "
        f"{_minutes(found.training_s)} to train on {_tokens(found.training_tokens)}, "
        f"{_minutes((1 - _WORK_SHARE) * left_s)} at most to measure",
        "for comparison: SmolLM2-135M-Instruct's head brought 1.8 tokens a round after 1.3 M tokens; fewer bring less, "
        "answers that repeat themselves or the question bring more; whether it pays is measured at the end",
    )


def _tokens(count: float) -> str:
    return f"{count / 1e6:.2f} M tokens" if count >= 10_000 else f"{count:,.0f} tokens"


def _minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
