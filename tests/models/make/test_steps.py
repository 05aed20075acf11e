"""Every step of the demo family's making is a command that exists, and the commands run when they are run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from models.make import make_heads, make_models

COMMANDS = ("make_models", "make_heads")


def steps() -> list[make_heads.Step]:
    work, models = Path("work"), Path("models")
    return [
        *make_models.plan(work, models, resume_target=False, resume_hybrid=False),
        *make_heads.plan(work, models),
    ]


@pytest.mark.parametrize("step", steps(), ids=lambda step: step.name)
def test_a_step_is_a_command(
    step: make_heads.Step, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module is there, and its --help names every option that the step uses."""
    options = [argument.partition("=")[0] for argument in step.arguments if argument.startswith("--")]
    words = [step.arguments[0]] if step.module == "outrider.training" else []
    monkeypatch.setenv("COLUMNS", "300")
    shown = help_of(step.module, words, capsys, monkeypatch)
    assert [option for option in options if option not in shown] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It had a name in place of `__main__`, and did nothing."""
    assert "Usage" in help_of(f"models.make.{command}", [], capsys, monkeypatch)


def help_of(module: str, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "argv", [module, *words, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    return capsys.readouterr().out
