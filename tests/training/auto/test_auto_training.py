"""`outrider train auto` around its training: what is refused, remembered and divided, and that it goes on to the bit.

The whole command with its stacks: test_auto_command.py.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import LlamaForCausalLM

from outrider.training.auto.config import AutoConfig, AutoState
from outrider.training.auto.pipeline import run_auto
from outrider.training.auto.plan import Plan, Rates, first_line, lines, num_steps, plan
from outrider.training.auto.verdict import Verdict
from outrider.training.curves import line, sparkline
from outrider.training.errors import CheckpointError, PromptError, SettingError
from outrider.training.progress import Progress
from outrider.training.run_record import read_log
from tests.training.tiny import VOCAB_SIZE, write_target

VERDICT = Verdict(100.0, 120.0, 2, 1.9, {"off": 100.0, "2": 120.0})
STEPS = 8


class Stopping(Progress):
    """A progress whose process gets Ctrl-C when the training is at step `at`."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__(Console(quiet=True), what)
        self._at = at

    def advance(self, note: str = "", done: int | None = None) -> None:
        if done == self._at:
            signal.raise_signal(signal.SIGINT)


def quiet(what: str) -> Progress:
    return Stopping(what, -1)


def written(folder: Path) -> AutoConfig:
    """A run with answers, written greedily by the target, and a verdict, so that what is left needs no stack."""
    target = folder / "target"
    if not target.exists():
        write_target(target)
    config = AutoConfig(str(target), folder / "out")
    config.output.mkdir()
    prompts = torch.from_numpy(np.random.default_rng(3).integers(1, VOCAB_SIZE, (20, 2)))
    model = LlamaForCausalLM.from_pretrained(target).eval()
    answers = model.generate(prompts, do_sample=False, max_new_tokens=18, min_new_tokens=18, pad_token_id=0)[:, 2:]
    rows = [
        {"prompt_token_ids": prompt, "token_ids": answer}
        for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True)
    ]
    for name, part in (("data", rows[4:]), ("held-out", rows[:4])):
        (config.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    state = AutoState({name: getattr(config, name) for name in ("model", "prompts", "hours", "max_tokens", "seed")})
    state.steps, state.verdict = STEPS, asdict(VERDICT)
    state.save(config.output)
    return config


def test_a_training_that_is_stopped_goes_on_to_the_bit(tmp_path: Path) -> None:
    """The same call again; and a third finds everything done."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder in (whole, stopped):
        folder.mkdir()
    state, verdict = run_auto(written(whole), quiet)
    assert verdict == VERDICT
    assert state.tokens_per_round >= 1.0
    (stopped / "target").symlink_to(whole / "target")
    config = written(stopped)
    with pytest.raises(KeyboardInterrupt):
        run_auto(config, lambda what: Stopping(what, 4))
    assert not (config.output / "model").exists()
    spent_s = AutoState.of(config).spent_s
    assert spent_s > 0
    again, _ = run_auto(config, quiet)
    assert (again.tokens_per_round, again.is_trained) == (state.tokens_per_round, True)
    assert again.spent_s > spent_s
    files = [folder / "out" / "model" / "model.safetensors" for folder in (whole, stopped)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert (config.output / "curves.png").read_bytes().startswith(b"\x89PNG")
    changed = files[1].stat().st_mtime_ns
    assert run_auto(config, quiet)[0].is_trained
    assert files[1].stat().st_mtime_ns == changed


@pytest.mark.parametrize(("until", "hours"), [(1.01, 2.0), (None, 1e-6)])
def test_it_ends_when_there_is_enough_or_the_time_is_over(tmp_path: Path, until: float | None, hours: float) -> None:
    config = written(tmp_path)
    state = AutoState.of(config)
    state.steps, state.settings["hours"] = 60, hours
    state.save(config.output)
    config = AutoConfig(config.model, config.output, until=until, hours=hours)
    state, _ = run_auto(config, quiet)
    rows = read_log(config.output)
    assert rows[-1]["step"] < 60
    assert (config.output / "model" / "config.json").exists()
    assert until is None or state.tokens_per_round >= until


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hours": 3.0}, "was made with --hours 2.0, not 3.0"),
        ({"seed": 1}, "was made with --seed 0, not 1"),
        ({"max_tokens": 64}, "was made with --max-tokens 192, not 64"),
        ({"model": "other"}, "was made with MODEL"),
    ],
)
def test_another_run_is_not_gone_on_with(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    config = written(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        AutoState.of(AutoConfig(**{**asdict(config), **changes}))
    assert AutoState.of(AutoConfig(**{**asdict(config), "until": 3.0})).steps == STEPS, "a new end is no new run"


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    config = AutoConfig("models/demo-target", tmp_path)
    (tmp_path / "auto.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not what `outrider train auto` writes"):
        AutoState.of(config)
    (tmp_path / "auto.json").rename(tmp_path / "thesis.txt")
    with pytest.raises(CheckpointError, match="has other files; give a new folder"):
        AutoState.of(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hours": float("nan")}, "--hours must be above 0"),
        ({"hours": float("inf")}, "--hours must be above 0"),
        ({"until": 1.0}, "--until must be above 1 and at most 6"),
        ({"until": float("nan")}, "--until must be above 1 and at most 6"),
        ({"max_tokens": 7}, "--max-tokens must be at least 8"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        AutoConfig("models/demo-target", tmp_path / "new", **changes).check()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": [1, 2]}] * 20, "no token ids"),
        ([{"prompt": "a"}] * 10 + [{"messages": [{"role": "user", "content": "b"}]}] * 10, "all texts or all chats"),
        ([{"prompt": "a"}] * 3, "has 3 prompts, fewer than 16"),
    ],
)
def test_prompts_that_cannot_be(tmp_path: Path, rows: list[Any], words: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(PromptError, match=words):
        AutoConfig("models/demo-target", tmp_path / "new", prompts=str(file)).check()


# 100 tokens/s: a question is a turn of 10 tokens and two answers of 45, so 100 tokens, and each turn is one.
RATES = Rates(written=100.0, trained=200.0, turn_tokens=10.0, prompt_tokens=5.0, answer_tokens=45.0, prompts_per_turn=1)


def test_the_plan_fills_the_time() -> None:
    found = plan(RATES, 10_000.0, None)
    assert (found.num_turns, found.num_questions, found.writing_s) == (4500, 4500, 4500.0)
    assert found.training_tokens == pytest.approx(2 * 4500 * 100), "two epochs"
    assert found.training_s == pytest.approx(4500.0)
    slow = plan(replace(RATES, trained=10.0), 10_000.0, None)
    assert slow.writing_s + slow.training_s == pytest.approx(9000, rel=0.01)
    few = plan(RATES, 10_000.0, 50)
    assert few.num_questions == 50, "there are no more in the file"
    assert few.training_tokens == pytest.approx(4 * 50 * 100), "they are read again, but not without end"
    assert plan(RATES, 0.0, None).num_questions == 16, "the fewest that are worth it"


def test_steps_are_those_that_fit(tmp_path: Path) -> None:
    """Rows of 50 tokens, 8 to a batch: 2 s at 200 tokens/s."""
    data = tmp_path / "data.jsonl"
    row = {"prompt_token_ids": [1] * 5, "token_ids": [1] * 45}
    data.write_text((json.dumps(row) + "\n") * 800)
    assert num_steps(data, RATES, 130.0) == int(130 * 0.85 / 2)
    assert num_steps(data, RATES, 1e9) == 4 * 800 // 8, "no more than four epochs"
    assert num_steps(data, RATES, -5.0) == 1


def test_curves() -> None:
    assert sparkline([1.0, 8.0, 4.5]) == "▁█▅"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert len(sparkline([float(value) for value in range(100)])) == 24
    rows: list[dict[str, Any]] = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 1.0}]
    assert line(rows) == ""
    assert line([*rows, {"step": 2, "eval": {"tokens_per_round": 1.5}}]) == "loss █▁ 1.000   tokens a round ▁ 1.50"


def test_what_is_said_at_the_end() -> None:
    assert VERDICT.sentence() == (
        "It pays on this machine, 1.20 times plain decoding: 120 tokens/s with 2 drafted a round (1.90 tokens a "
        "round), 100 without the head, the same answers."
    )
    assert VERDICT.serve_line("my model", Path("out/model")) == (
        "outrider serve 'my model' --speculative-config "
        '\'{"method": "eagle3", "model": "out/model", "num_speculative_tokens": 2}\''
    )
    slow = Verdict(100.0, 104.0, 1, 1.2, {})
    assert slow.sentence().startswith("It does not pay on this machine, 1.04 times plain decoding at best: ")
    assert slow.serve_line("m", Path("out/model")) == "outrider serve m"


@pytest.mark.parametrize(("count", "said"), [(192_000, "on 0.19 M tokens, "), (691, "on 691 tokens, ")])
def test_few_tokens_are_not_said_as_none(count: int, said: str) -> None:
    assert said in lines(RATES, Plan(15, 15, 46.0, 33.0, count), 100.0)[1]


@pytest.mark.parametrize(
    ("hours", "said"), [(2, "at most 2.0 h in all"), (0.2, "at most 12 min"), (0.01, "at most 36 s")]
)
def test_the_whole_time_is_said_first(hours: float, said: str) -> None:
    assert first_line(3600 * hours).startswith(said)
