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


def answers_of_vllm(python: Path, task: Task, speculation: Mapping[str, Any] | None, folder: Path) -> Answers:
    """folder: for its log and its answers. Raises ConfigError if `python` cannot be run."""
    arguments: dict[str, Any] = {
        "model": str(task.target),
        "dtype": task.dtype,
        "max_model_len": CONTEXT_LEN,
        "max_num_seqs": len(task.prompts),
        "enable_prefix_caching": False,
    }
    if speculation is not None:
        arguments["speculative_config"] = dict(speculation)
    answers = folder / "answers.json"
    answers.unlink(missing_ok=True)
    job = {
        "arguments": arguments,
        "prompts": [list(prompt) for prompt in task.prompts],
        "max_tokens": task.max_tokens,
        "answers": str(answers),
    }
    log = folder / "vllm.log"
    with log.open("wb") as out:
        try:
            subprocess.run(
                [str(python), str(_PROGRAM)], input=json.dumps(job).encode(), stdout=out, stderr=out, check=False
            )
        except OSError as error:
            raise ConfigError(f"--vllm {python}: {error.strerror}") from error
    if not answers.exists():
        return Answers(error=last_error(log.read_text(errors="replace")))
    return Answers(**json.loads(answers.read_text(encoding="utf-8")))


def answers_here(task: Task, speculation: Mapping[str, Any] | None) -> Answers:
    """By the offline LLM: the services' engines and decode loop."""
    params = SamplingParams(temperature=0.0, max_tokens=task.max_tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in task.prompts]
    with LLM(task.target, speculative_config=speculation, dtype=task.dtype, max_model_len=CONTEXT_LEN) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    drafts = [found for output in outputs if (found := output.metrics.speculative_decoding) is not None]
    return Answers(
        [output.outputs[0].token_ids for output in outputs],
        sum(found["num_draft_tokens"] for found in drafts),
        sum(found["num_accepted_draft_tokens"] for found in drafts),
    )


def last_error(log: str) -> str:
    """The last line of a Python traceback in a log, cut."""
    named = [line for line in log.splitlines() if "Error" in line.split(":")[0] or "Exception" in line.split(":")[0]]
    return (named or log.splitlines() or ["no output"])[-1].strip()[:_LONGEST_ERROR]
