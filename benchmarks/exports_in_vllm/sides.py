"""The same greedy prompts with one drafter, in vLLM and here."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.offline import LLM, SamplingParams
from outrider.shared.errors import ConfigError

_PROGRAM = Path(__file__).with_name("in_vllm.py")
# tokens; of a prompt and its answer
CONTEXT_LEN = 512
# characters; of an error in a table
_LONGEST_ERROR = 160


@dataclass(frozen=True)
class Task:
    """prompts: token ids. dtype: both sides' weights and activations."""

    target: Path
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    dtype: str


@dataclass(frozen=True)
class Answers:
    """error: why there are none. num_drafted, num_accepted: tokens, over all prompts."""

    token_ids: Sequence[Sequence[int]] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    version: str = ""
    error: str = ""


@dataclass(frozen=True)
class Run:
    """One drafter's answers to a task. speculation: of both sides; None: no drafter."""

    task: Task
    speculation: Mapping[str, Any] | None


def answers_of_vllm(python: Path, runs: Sequence[Run], folder: Path) -> list[Answers]:
    """One for each run. folder: for logs and answers. Raises ConfigError if `python` cannot be run."""
    jobs = [_job(run, folder / f"{number}") for number, run in enumerate(runs)]
    log = folder / "vllm.log"
    with log.open("wb") as out:
        try:
            subprocess.run(
                [str(python), str(_PROGRAM)], input=json.dumps(jobs).encode(), stdout=out, stderr=out, check=False
            )
        except OSError as error:
            raise ConfigError(f"--vllm {python}: {error.strerror}") from error
    return [_read(Path(job["answers"]), Path(job["log"]), log) for job in jobs]


def _job(run: Run, stem: Path) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(run.task.target),
        "dtype": run.task.dtype,
        "max_model_len": CONTEXT_LEN,
        "max_num_seqs": len(run.task.prompts),
        "enable_prefix_caching": False,
    }
    if run.speculation is not None:
        arguments["speculative_config"] = dict(run.speculation)
    return {
        "arguments": arguments,
        "prompts": [list(prompt) for prompt in run.task.prompts],
        "max_tokens": run.task.max_tokens,
        "answers": str(stem.with_suffix(".json")),
        "log": str(stem.with_suffix(".log")),
    }


def _read(answers: Path, log: Path, log_of_all: Path) -> Answers:
    if answers.exists():
        return Answers(**json.loads(answers.read_text(encoding="utf-8")))
    return Answers(error=last_error((log if log.exists() else log_of_all).read_text(errors="replace")))


def answers_here(run: Run) -> Answers:
    """Answers with the offline LLM: the services' engines and decode loop."""
    task = run.task
    params = SamplingParams(temperature=0.0, max_tokens=task.max_tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in task.prompts]
    with LLM(task.target, speculative_config=run.speculation, dtype=task.dtype, max_model_len=CONTEXT_LEN) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    drafts = [found for output in outputs if (found := output.metrics.speculative_decoding) is not None]
    return Answers(
        [output.outputs[0].token_ids for output in outputs],
        sum(found["num_draft_tokens"] for found in drafts),
        sum(found["num_accepted_draft_tokens"] for found in drafts),
    )


def last_error(log: str) -> str:
    """The last line of a Python traceback in a log, cut. Of an error of pydantic: the reason, on the line after it."""
    lines = log.splitlines() or ["no output"]
    named = [at for at, line in enumerate(lines) if "Error" in line.split(":")[0] or "Exception" in line.split(":")[0]]
    at = named[-1] if named else len(lines) - 1
    if "ValidationError" in lines[at] and at + 1 < len(lines):
        at += 1
    return lines[at].strip()[:_LONGEST_ERROR]
