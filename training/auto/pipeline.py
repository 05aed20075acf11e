"""The steps of `outrider train auto`: probes, questions, answers, training, measuring. Each goes on where it stopped.

    OUTPUT/auto.json          what is remembered between two calls
    OUTPUT/data.turns.jsonl   sampled user turns
    OUTPUT/held-out.jsonl     questions that are not trained on, with greedy answers
    OUTPUT/data.jsonl         the answers that are trained on
    OUTPUT/states/            the target's hidden states, written with the answers, until the training has ended
    OUTPUT/train.jsonl, checkpoint-*, model/    the run (training/train.py)
    OUTPUT/curves.png         loss, and tokens a round on held-out answers

Not here: what the steps do (data/, train.py, verdict.py), and how the time is divided (plan.py).
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig as ModelConfig

from outrider.client.cli.stack import started
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.processes import free_port, stop_running
from outrider.drafting.recorded_states import (
    RecordedSession,
    RecordedStates,
    next_path,
    recorded_layers,
    write_states,
)
from outrider.engine.model.local_model import local_model
from outrider.engine.model.weights_digest import weights_digest
from outrider.shared.errors import ConfigError
from outrider.training.auto.config import DRAFT_LEN, LEAST_QUESTIONS, METHOD, AutoConfig, AutoState
from outrider.training.auto.plan import SEQ_LEN, Rates, first_line, lines, num_steps, plan
from outrider.training.auto.verdict import Verdict, measure
from outrider.training.curves import write_picture
from outrider.training.data.jsonl_file import JsonlFile
from outrider.training.data.prepare_data import PrepareConfig, prepare
from outrider.training.data.prompts import Prompt
from outrider.training.data.sampled_prompts import sampled_prompts, turns_file
from outrider.training.errors import PromptError
from outrider.training.heads.options import HeadOptions
from outrider.training.progress import Progress
from outrider.training.run_config import OptimizationConfig, RunConfig
from outrider.training.run_record import Interrupted, read_log
from outrider.training.train import run
from outrider.training.watch import Watch

# user turns that are sampled, or questions that are taken, to measure how fast they are written
_PROBE_TURNS = 48
# seconds; a probe of the writing is stopped between them, after its share of the time
_LEAST_PROBE_S, _MOST_PROBE_S, _PROBE_SHARE = 15.0, 60.0, 0.1
# questions; held out at most, and as a share of the probe's
_MOST_HELD_OUT, _HELD_OUT_SHARE = 24, 0.25
_CONCURRENCY = 16
_TEMPERATURES = (0.0, 0.8)
# steps of the training's probe, and tokens of a window there; the first step is slower than the rest
_PROBE_STEPS, _PROBE_WINDOW = 3, 256
# tokens; the draft vocabulary, where the target's is larger; 97.5 % of the tokens that SmolLM2-135M writes
_DRAFT_VOCABULARY = 8192
# seconds; of the last measurement, and as a share of the time
_MEASURE_S, _MEASURE_SHARE = 300.0, 0.05
# seconds; planned for at least, however little of --hours is left: enough for the fewest questions of a tiny model
_LEAST_PLANNED_S = 60.0
# seconds; trained for at least
_LEAST_TRAINING_S = 1.0
# share of the answers; with fewer recorded, what is left out is worth more than the second pass takes
_LEAST_RECORDED = 0.9
# evaluations in a training; each adds a point to the curve
_NUM_EVALUATIONS = 12

ProgressOf = Callable[[str], Progress]


@dataclass
class AutoRun:
    """One call. began: in time.monotonic()'s seconds."""

    config: AutoConfig
    state: AutoState
    target: Path
    progress: ProgressOf
    began: float

    @property
    def left_s(self) -> float:
        """Returns the seconds left, without those that the last stack needs to start."""
        return 3600 * self.config.hours - self.state.spent_s - (time.monotonic() - self.began) - self.state.start_s

    @property
    def data(self) -> Path:
        return self.config.output / "data.jsonl"

    @property
    def states(self) -> Path:
        return self.config.output / "states"

    @property
    def held_out(self) -> Path:
        return self.config.output / "held-out.jsonl"

    @cached_property
    def weights(self) -> str:
        """Returns the digest of the target's weights, which are read for it."""
        return weights_digest(self.target)

    def save(self) -> None:
        now = time.monotonic()
        self.state.spent_s, self.began = self.state.spent_s + now - self.began, now
        self.state.save(self.config.output)


def run_auto(config: AutoConfig, progress: ProgressOf) -> tuple[AutoState, Verdict]:
    """All steps that are not done yet. Raises TrainingError, OutriderError; KeyboardInterrupt: it may go on later."""
    state = AutoState.of(config)
    auto = AutoRun(config, state, Path(local_model(config.model, "MODEL")), progress, time.monotonic())
    try:
        if not state.steps:
            if not state.rates:
                progress("").say(first_line(auto.left_s))
            _write_answers(auto)
        if not state.is_trained:
            _train(auto)
        if not state.verdict:
            with _stack(auto, str(config.output / "model")) as url:
                limit_s = min(_MEASURE_S, _MEASURE_SHARE * 3600 * config.hours)
                found = asyncio.run(measure(url, auto.held_out, limit_s, config.seed, progress("questions")))
            state.verdict = asdict(found)
    finally:
        auto.save()
    return state, Verdict(**state.verdict)


def _write_answers(auto: AutoRun) -> None:
    if "trained" not in auto.state.rates:
        auto.state.rates["trained"] = _trained_per_second(auto)
        auto.save()
    given, say = auto.config.given_prompts(), auto.progress("").say
    with _stack(auto, verifier_args=_recording(auto)) as url:
        asked = PrepareConfig(
            base_url=f"{url}/v1", model="", output=auto.data, temperatures=_TEMPERATURES, concurrency=_CONCURRENCY,
            max_tokens=auto.config.max_tokens, seed=auto.config.seed,
        )  # fmt: skip
        if "written" not in auto.state.rates:
            _probe_writing(auto, asked, given)
            auto.save()
        rates = Rates(**auto.state.rates)
        left_s = max(_LEAST_PLANNED_S, auto.left_s)
        found = plan(rates, left_s, None if given is None else len(given))
        for line in lines(rates, found, left_s):
            say(line)
        # Writing may be slower than it was at the probe: what there is then is enough.
        _within(found.writing_s * 1.25, _answers(auto, asked, given, found.num_turns), say)
    if not _rows(auto.data):
        raise PromptError(f"no answer was written within {found.writing_s:.0f} s; repeat the command")
    auto.state.steps = num_steps(auto.data, rates, max(_LEAST_PLANNED_S, auto.left_s))


def _trained_per_second(auto: AutoRun) -> float:
    """Tokens that training reads per second, by a run of a few steps on random tokens: it also fails early, and not
    after hours of writing, where this target cannot be trained on.
    """
    folder = auto.config.output / "probe"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    num_windows = OptimizationConfig.batch_size * _PROBE_STEPS
    config = _text_config(auto.target)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (num_windows, _PROBE_WINDOW)).astype(np.int32)
    np.save(folder / "random.npy", tokens)
    layers = recorded_layers(config.num_hidden_layers)
    rows = torch.randn(_PROBE_WINDOW, len(layers) * config.hidden_size, dtype=torch.bfloat16)
    sessions = [RecordedSession(each, rows) for each in tokens]
    write_states(next_path(folder), sessions, layers, auto.weights)
    settings = _run_config(auto, folder, folder / "random.npy", _PROBE_STEPS, seq_len=_PROBE_WINDOW)
    run(replace(settings, hidden_states=folder), auto.progress("probe"))
    speed = float(read_log(folder)[-1]["tokens_per_s"])
    shutil.rmtree(folder)
    return speed


def _probe_writing(auto: AutoRun, asked: PrepareConfig, given: list[Prompt] | None) -> None:
    """Writes the held-out questions and their answers, and measures how fast."""
    limit_s = max(_LEAST_PROBE_S, min(_MOST_PROBE_S, _PROBE_SHARE * auto.left_s))
    say = auto.progress("").say
    began = time.monotonic()
    prompts = _within(limit_s, _prompts(auto, asked, given, _PROBE_TURNS), say) or []
    num_held_out = min(_MOST_HELD_OUT, int(_HELD_OUT_SHARE * max(len(prompts), LEAST_QUESTIONS)), len(prompts))
    _within(limit_s, _held_out(auto, asked, prompts[:num_held_out]), say)
    seconds = time.monotonic() - began
    turns, answers = _rows(turns_file(auto.data)), _rows(auto.held_out)
    if not answers:
        raise PromptError(f"no question was answered within {seconds:.0f} s; repeat the command, or give --prompts")
    turn_tokens, answer_tokens = (sum(len(row["token_ids"]) for row in rows) for rows in (turns, answers))
    auto.state.num_held_out = num_held_out
    auto.state.rates |= {
        "written": (turn_tokens + answer_tokens) / seconds,
        "turn_tokens": turn_tokens / max(1, len(turns)),
        "prompt_tokens": sum(len(row["prompt_token_ids"]) for row in answers) / len(answers),
        "answer_tokens": max(1.0, answer_tokens / len(answers)),
        "prompts_per_turn": len(prompts) / len(turns) if turns else 1.0,
    }


async def _prompts(auto: AutoRun, asked: PrepareConfig, given: list[Prompt] | None, num_turns: int) -> list[Prompt]:
    if given is not None:
        return given[:num_turns]
    return await sampled_prompts(asked, num_turns, auto.progress("user turns"))


async def _held_out(auto: AutoRun, asked: PrepareConfig, prompts: list[Prompt]) -> None:
    await prepare(prompts, replace(asked, output=auto.held_out, temperatures=(0.0,)), auto.progress("held-out answers"))


async def _answers(auto: AutoRun, asked: PrepareConfig, given: list[Prompt] | None, num_turns: int) -> None:
    prompts = await _prompts(auto, asked, given, num_turns)
    await prepare(prompts[auto.state.num_held_out :], asked, auto.progress("answers"))


def _within(limit_s: float, work: Any, say: Callable[[str], None]) -> Any:
    """Returns what `work` returns; None if it was stopped at the limit: its files have whole lines only."""

    async def bounded() -> Any:
        async with asyncio.timeout(limit_s):
            return await work

    try:
        return asyncio.run(bounded())
    except TimeoutError:
        say(f"stopped after {limit_s:.0f} s")
        return None


def _train(auto: AutoRun) -> None:
    config, state = auto.config, auto.state
    auto.save()
    rows = _rows(auto.held_out)
    until = f", or until {config.until:g} tokens a round" if config.until else ""
    auto.progress("").say(f"training for {state.steps} step{'' if state.steps == 1 else 's'}{until}")
    deadline = time.monotonic() + max(
        _LEAST_TRAINING_S, auto.left_s - min(_MEASURE_S, _MEASURE_SHARE * 3600 * config.hours)
    )
    watch = Watch(rows, DRAFT_LEN, config.until, deadline)
    settings = _run_config(auto, config.output, auto.data, state.steps, auto.held_out)
    try:
        run(replace(settings, hidden_states=_recorded(auto)), auto.progress(METHOD), watch)
    except Interrupted:
        raise KeyboardInterrupt from None  # this command needs no --resume
    log = read_log(config.output)
    state.tokens_per_round = next(row["eval"]["tokens_per_round"] for row in reversed(log) if "eval" in row)
    write_picture(log, config.output / "curves.png", f"{METHOD} head of {config.model}")
    state.is_trained = True
    auto.save()
    shutil.rmtree(auto.states, ignore_errors=True)  # gigabytes


def _recording(auto: AutoRun) -> tuple[str, ...]:
    """The verifier's arguments for writing hidden states, which may take half of the disk's free space."""
    free_gb = shutil.disk_usage(auto.config.output).free / (1 << 30)
    return "--record-hidden-states", str(auto.states), "--record-hidden-states-gb", f"{max(0.01, free_gb / 2):.2f}"


def _recorded(auto: AutoRun) -> Path | None:
    """The folder of hidden states; None: too few answers have any, and the target is run instead."""
    try:
        recorded = RecordedStates(auto.states, auto.weights)
    except ConfigError:
        return None
    texts = [np.array([*row["prompt_token_ids"], *row["token_ids"]], dtype=np.int32) for row in _rows(auto.data)]
    num_found = sum(recorded.find(text) is not None for text in texts)
    return auto.states if num_found >= _LEAST_RECORDED * len(texts) else None


def _run_config(
    auto: AutoRun, output: Path, data: Path, steps: int, held_out: Path | None = None, seq_len: int = SEQ_LEN
) -> RunConfig:
    """Returns the settings that the head of SmolLM2-135M was trained with (docs/models.md)."""
    reduced = _DRAFT_VOCABULARY if _text_config(auto.target).vocab_size > 2 * _DRAFT_VOCABULARY else 0
    return RunConfig(
        method=METHOD,
        target=auto.target,
        data=(data,),
        output=output,
        head=HeadOptions(ttt_steps=4, draft_vocab_size=reduced, save_embedding=False),
        optimization=OptimizationConfig(
            steps=steps, lr=3e-3, warmup_steps=min(40, steps // 4), optimizer="muon", seed=auto.config.seed
        ),
        seq_len=seq_len,
        fit_batch=True,
        eval_data=() if held_out is None else (held_out,),
        eval_batches=2,
        eval_every=max(1, steps // _NUM_EVALUATIONS),
        checkpoint_every=max(1, min(100, steps // _NUM_EVALUATIONS)),
        log_every=max(1, steps // 100),
        target_name=auto.config.model,
        resume=True,
    )


def _text_config(target: Path) -> Any:
    return ModelConfig.from_pretrained(target).get_text_config()


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with JsonlFile(path) as file:
        return file.rows


@contextmanager
def _stack(auto: AutoRun, head: str = "", verifier_args: tuple[str, ...] = ()) -> Iterator[str]:
    """The URL of a stack that serves the target, with the head or without; its logs are in OUTPUT/stack."""
    settings = StackSettings(
        str(auto.target), head, port=0, grpc_port=free_port(), num_drafters=0, verifier_args=verifier_args
    )
    began = time.monotonic()
    run_dir, say = auto.config.output / "stack", auto.progress("").say
    stop_running(run_dir, say)  # what a call left that was killed
    stack = started(settings, run_dir, say)
    auto.state.start_s = time.monotonic() - began
    try:
        yield stack.state.url
    finally:
        stack.stop()
