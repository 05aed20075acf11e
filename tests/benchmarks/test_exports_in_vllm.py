"""The table of exports in vLLM: figures written by hand, this side on a real pair, and a Python without vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.exports_in_vllm.__main__ import Drafter, drafter_of, row, table, token_prompts
from benchmarks.exports_in_vllm.sides import Answers, Task, answers_here, answers_of_vllm, last_error
from outrider.shared.errors import ConfigError

MODELS = Path(__file__).parents[2] / "models"
TARGET = MODELS / "demo-target"


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
    assert last_error("killed\n") == "killed"
    assert last_error("") == "no output"


def test_a_python_without_vllm_says_so(tmp_path: Path) -> None:
    task = Task(TARGET, [[5, 6, 7]], 4, "float32")
    answers = answers_of_vllm(Path(sys.executable), task, None, tmp_path)
    assert answers.error == "ModuleNotFoundError: No module named 'vllm'"
    with pytest.raises(ConfigError, match=r"--vllm .*: No such file"):
        answers_of_vllm(tmp_path / "python", task, None, tmp_path)


@pytest.mark.storm
def test_this_side_drafts_in_chains_of_the_given_length() -> None:
    drafter = drafter_of(MODELS / "demo-eagle", TARGET, 3)
    assert drafter.speculation["method"] == "eagle"
    task = Task(TARGET, token_prompts(TARGET, 2), 12, "float32")
    drafted, plain = answers_here(task, drafter.speculation), answers_here(task, None)
    assert drafted.token_ids == plain.token_ids
    assert [len(answer) for answer in drafted.token_ids] == [12, 12]
    assert 0 < drafted.num_accepted <= drafted.num_drafted
    assert plain.num_drafted == 0
