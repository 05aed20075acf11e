"""`outrider train` and `certify` refuse a wrong option without importing torch, which takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGET, HEAD = "models/demo-target", "models/demo-eagle3"
# An import of torch fails from here on.
_RUN = """
import sys
sys.modules["torch"] = None
from {module} import app
app({arguments!r})
"""
TRAIN = ("train", "--method", "eagle3", "--target", TARGET, "--data", "README.md", "--output", "{tmp}/run")


def run(module: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    script = _RUN.format(module=module, arguments=arguments)
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*TRAIN, "--method", "eagle4"), "--method 'eagle4': must be one of medusa,"),
        ((*TRAIN, "--data", "no.jsonl"), "no.jsonl does not exist"),
        ((*TRAIN, "--target", HEAD), f"--target: {HEAD} is a draft head of demo-target, not a model; give its target"),
        ((*TRAIN, "--steps", "0"), "--steps must be at least 1, not 0"),
        ((*TRAIN, "--init", "nowhere"), "--init nowhere is not a checkpoint folder"),
        (("auto", "nowhere"), "MODEL: nowhere does not exist"),
        (("auto", HEAD), f"MODEL: {HEAD} is a draft head of demo-target, not a model; give its target"),
        (("auto", TARGET, "--until", "9"), "--until must be above 1 and at most 6, not 9"),
        (("auto", TARGET, "--prompts", "no.jsonl"), "--prompts: no.jsonl does not exist"),
        (("auto", TARGET, "--output", "docs"), "--output docs has other files; give a new folder"),
        (("export", "--run", "nowhere", "--target", TARGET, "--output", "{tmp}/x"), "--run nowhere: there is no such"),
    ],
)
def test_train(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = run("outrider.training.commands.app", [word.replace("{tmp}", str(tmp_path)) for word in arguments])
    assert done.returncode in (1, 2), done.stderr
    assert said in " ".join(done.stderr.split())


def test_what_is_right_goes_on_to_torch(tmp_path: Path) -> None:
    """Or the tests above would pass with a command that never needs it."""
    done = run("outrider.training.commands.app", [word.replace("{tmp}", str(tmp_path)) for word in TRAIN])
    assert "this needs package torch" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "MODEL: nowhere does not exist"),
        ([HEAD], f"MODEL: {HEAD} is a draft head of demo-target"),
        ([TARGET, "--dtype", "int4"], "Invalid value for '--dtype'"),
        ([TARGET, "--kv-cache-dtype", "fp4"], "--kv-cache-dtype: 'fp4' is not one of auto, fp8"),
    ],
)
def test_certify(arguments: list[str], said: str) -> None:
    done = run("outrider.engine.certify", arguments)
    assert done.returncode == 2, done.stderr
    assert said in " ".join(done.stderr.split())
