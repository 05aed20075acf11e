"""Exports in vLLM: figures written by hand, this side on a real pair, and a vLLM that is missing or refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.exports_in_vllm.__main__ import Drafter, drafter_of, row, table, token_prompts
from benchmarks.exports_in_vllm.sides import Answers, Run, Task, answers_here, answers_of_vllm, last_error
from outrider.shared.errors import ConfigError

MODELS = Path(__file__).parents[2] / "models"
TARGET = MODELS / "demo-target"

# Repeats the prompt; refuses drafters.
STAND_IN = """
from types import SimpleNamespace as Fields

__version__ = "1.2"
SamplingParams = Fields

class LLM:
    def __init__(self, speculative_config=None, **_):
        if speculative_config:
            raise ValueError(f"{speculative_config['method']} is not supported")

    def generate(self, prompts, params, use_tqdm):
        cut = [prompt["prompt_token_ids"][: params.max_tokens] for prompt in prompts]
        return [Fields(outputs=[Fields(token_ids=ids)]) for ids in cut]

    def get_metrics(self):
        names = {"draft_tokens": 4, "accepted_tokens": 3}
        return [Fields(name=f"vllm:spec_decode_num_{name}", value=value) for name, value in names.items()]
"""


def test_a_row_counts_drafts_of_both_sides_and_equal_answers() -> None:
    drafter = Drafter("head", TARGET, {"method": "eagle", "num_speculative_tokens": 3})
    plain = Answers([[1, 2], [3, 4], [5, 6]])
    there = Answers([[1, 2], [3, 9], [5, 6]], 20, 15, "0.32.0")
    here = Answers([[1, 2], [3, 4], [7, 6]], 10, 5)
    [*_, line] = table([row(drafter, plain, there, here)])
    assert line == "| head | eagle | 15 of 20 (0.75) | 5 of 10 (0.50) | 2/3 | 2/3 |"


def test_what_vllm_refuses_is_named_in_the_table() -> None:
    drafter = Drafter("head", TARGET, {"method": "mlp_speculator", "num_speculative_tokens": 3})
    there = Answers(error="ValueError: not supported")
    [*_, line] = table([row(drafter, Answers([[1]]), there, Answers([[1]], 4, 2))])
    assert line == "| head | mlp_speculator | `ValueError: not supported` | 2 of 4 (0.50) |  | 1/1 |"


def test_the_error_of_a_log_is_the_last_line_that_names_one() -> None:
    log = "INFO: Error is no part of this\nTraceback\nValueError: first\n  Value error, why\npkg.KeyError: 'a'\nend\n"
    assert last_error(log) == "pkg.KeyError: 'a'"
    reason = "  Value error, not supported [type=value_error]"
    refused = f"pydantic_core.ValidationError: 1 error for SpeculativeConfig\n{reason}\n    For further information\n"
    assert last_error(refused) == reason.strip()
    assert last_error("killed\n") == "killed"
    assert last_error("") == "no output"


def test_a_python_without_vllm_says_so(tmp_path: Path) -> None:
    runs = [Run(Task(TARGET, [[5, 6, 7]], 4, "float32"), None)]
    [answers] = answers_of_vllm(Path(sys.executable), runs, tmp_path)
    assert answers.error == "ModuleNotFoundError: No module named 'vllm'"
    with pytest.raises(ConfigError, match=r"--vllm .*: No such file"):
        answers_of_vllm(tmp_path / "python", runs, tmp_path)


def test_one_drafter_that_vllm_refuses_leaves_the_others_their_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tasks = [Task(TARGET, [[5, 6, 7], [8, 9]], num_tokens, "float32") for num_tokens in (2, 1)]
    runs = [Run(tasks[0], None), Run(tasks[0], {"method": "medusa"}), Run(tasks[1], None)]
    first, refused, last = answers_of_vllm(Path(sys.executable), runs, tmp_path)
    assert first == Answers([[5, 6], [8, 9]], 4, 3, "1.2")
    assert refused == Answers(error="ValueError: medusa is not supported")
    assert last.token_ids == [[5], [8]]


@pytest.mark.storm
@pytest.mark.timeout(1800)
def test_this_side_drafts_in_chains_of_the_given_length() -> None:
    drafter = drafter_of(MODELS / "demo-eagle", TARGET, 3)
    assert drafter.speculation["method"] == "eagle"
    num_tokens = 24
    [prompt] = token_prompts(TARGET, 1)
    found = answers_here(Run(Task(TARGET, [prompt], num_tokens, "float32"), drafter.speculation))
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    settings = {"do_sample": False, "max_new_tokens": num_tokens, "eos_token_id": None, "pad_token_id": 0}
    generated = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **settings)
    assert found.token_ids == [generated[0, len(prompt) :].tolist()]
    # A round keeps its accepted drafts and one token more; the first token is the prompt's. Nothing is drafted past the
    # end, so the last rounds may have 2, 1 and 0 drafts.
    num_rounds = num_tokens - 1 - found.num_accepted
    assert 0 < found.num_accepted <= found.num_drafted
    assert 3 * num_rounds - 6 <= found.num_drafted <= 3 * num_rounds
