"""A run that is killed at any moment and resumed ends with the bits of one that was not; and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from outrider.drafting.checkpoints.recognise import recognise
from outrider.shared.errors import ConfigError
from outrider.training.commands.app import app
from outrider.training.data.head_data import BatchSource, load_windows
from outrider.training.data.tokenize_rows import RowEncoder
from outrider.training.errors import CheckpointError, DataError, DivergenceError, SettingError
from outrider.training.export_run import export_run
from outrider.training.frozen_target import FrozenTarget
from outrider.training.head_trainer import HeadTrainer, make_accelerator
from outrider.training.heads.interface import Batch
from outrider.training.heads.options import HeadOptions
from outrider.training.heads.registry import build_objective
from outrider.training.progress import Progress
from outrider.training.run_config import OptimizationConfig, RunConfig
from outrider.training.run_state import checkpoints, latest_checkpoint, load_checkpoint, save_checkpoint
from outrider.training.train import run
from tests.training.tiny import HEAD_METHODS, VOCAB_SIZE, write_rows, write_target

ROOT = Path(__file__).parents[2]
MUON = OptimizationConfig(steps=4, batch_size=4, optimizer="muon")
HEAD = HeadOptions(num_heads=2, inner_dim=16, ttt_steps=2, draft_vocab_size=30)


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_target(folder / "target")
    write_rows(folder / "data.npy")
    write_rows(folder / "held-out.npy", num_rows=8, seed=2)
    return folder


def command(work_dir: Path, output: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "outrider.training", "train", "--method", "eagle", "--threads", "1"),
        *("--target", str(work_dir / "target"), "--data", str(work_dir / "data.npy"), "--output", str(output)),
        *("--eval-data", str(work_dir / "held-out.npy"), "--eval-every", "20", "--log-every", "5"),
        *("--steps", "60", "--batch-size", "4", "--accumulation", "2", "--seq-len", "24", "--warmup-steps", "5"),
        *("--checkpoint-every", "7", "--ttt-steps", "2", *more),
    ]


def run_to_end(work_dir: Path, output: Path, *more: str) -> None:
    """In this process, which has torch already; runs that are stopped have their own."""
    done = CliRunner().invoke(app, command(work_dir, output, *more)[3:])
    assert done.exit_code == 0, (done.output, done.exception)


# With its first checkpoint from a step on it waits for the signal: it might have ended before a busy machine sends it.
_WAITS_FOR_THE_SIGNAL = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # before there are other threads
from outrider.training import run_record
from outrider.training.commands.app import app
step, save, waited = int(sys.argv.pop(1)), run_record.save_checkpoint, []
def save_and_wait(run_dir, at, state):
    path = save(run_dir, at, state)
    if at >= step and not waited:
        waited.append(signal.sigtimedwait([signal.SIGINT], 240))
        signal.getsignal(signal.SIGINT)(signal.SIGINT, None)
    return path
run_record.save_checkpoint = save_and_wait
app(prog_name="outrider train")
"""


def stop_at(work_dir: Path, output: Path, step: int, signum: int, *more: str) -> subprocess.CompletedProcess[str]:
    """Start the run, and send the signal as soon as a checkpoint of at least `step` is there."""
    arguments = command(work_dir, output, *more)[3:]
    process = subprocess.Popen(
        [sys.executable, "-c", _WAITS_FOR_THE_SIGNAL, str(step), *arguments], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 240
    while not any(int(path.name[-8:]) >= step for path in checkpoints(output)):
        assert process.poll() is None, "the run ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, "", stderr)


def rows_of(output: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (output / "train.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "tokens_per_s"} for row in rows]


def same_tree(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_tree(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same_tree, left, right))
    return bool(left == right)


# Two starts of Python and torch: 15 s on two idle cores, five times as long on busy ones.
@pytest.mark.timeout(900)
@pytest.mark.storm
def test_killed_interrupted_and_resumed(work_dir: Path) -> None:
    undisturbed, output = work_dir / "undisturbed", work_dir / "disturbed"
    run_to_end(work_dir, undisturbed)
    assert stop_at(work_dir, output, 14, signal.SIGKILL).returncode == -signal.SIGKILL
    with pytest.raises(CheckpointError, match="already has a run: continue it with --resume"):
        run(config_of(work_dir, output), quiet())
    # What a kill leaves behind: a folder that is not a checkpoint yet, log lines of steps after it, and a torn one.
    partial = output / ".checkpoint-00000021.partial"
    partial.mkdir(exist_ok=True)
    (partial / "state.pt").write_bytes(b"half")
    with (output / "train.jsonl").open("ab") as log:
        log.write(b'{"step": 59, "loss": 0.0}\n{"step": 60, "lo')
    stopped = stop_at(work_dir, output, 28, signal.SIGINT, "--resume")
    assert stopped.returncode == 130
    step = load_checkpoint(latest_checkpoint(output))["step"]
    assert f"stopped at step {step} of 60; continue with --resume" in stopped.stderr
    assert not (output / "model").exists()
    run_to_end(work_dir, output, "--resume")
    states = [load_checkpoint(latest_checkpoint(folder)) for folder in (undisturbed, output)]
    assert states[0]["step"] == 60
    assert same_tree(*states)
    assert (output / "model/model.safetensors").read_bytes() == (undisturbed / "model/model.safetensors").read_bytes()
    # Loss lines are means since the line before, so those next to a stop cover other steps; the rest is the same.
    assert [row["step"] for row in rows_of(output)] == [row["step"] for row in rows_of(undisturbed)]
    assert [row for row in rows_of(output) if "eval" in row] == [row for row in rows_of(undisturbed) if "eval" in row]


@pytest.mark.storm
def test_two_processes_train_what_one_does(work_dir: Path) -> None:
    """Rows are shared out and gradients averaged: up to the order of sums the losses and weights are the same."""
    fast = ("--steps", "6", "--precision", "fp32", "--log-every", "1", "--feature-noise", "0")
    outputs = [work_dir / "one-process", work_dir / "two-processes"]
    subprocess.run(command(work_dir, outputs[0], *fast), check=True, capture_output=True, timeout=240)
    # --standalone: at a port of its own, where the default is one port for all of a machine.
    launch = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "outrider.training",
    )
    shared = [*launch, *command(work_dir, outputs[1], *fast, "--json")[3:]]
    done = subprocess.run(shared, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["model"], result["method"]) == (str(outputs[1] / "model"), "eagle")
    assert [result["train"], result["held_out"]] == [
        json.loads(line) for line in (outputs[1] / "train.jsonl").read_text().splitlines()[-2:]
    ]
    assert result["train"]["step"] == result["held_out"]["step"] == 6
    assert "parameters to train" in done.stderr
    alone, together = (
        [row[name] for row in rows_of(output) if "loss" in row for name in ("loss", "grad_norm")] for output in outputs
    )
    assert together == pytest.approx(alone, rel=1e-3)
    states = [load_checkpoint(latest_checkpoint(output)) for output in outputs]
    for name, tensor in states[0]["head"].items():
        assert torch.allclose(tensor, states[1]["head"][name], atol=1e-4), name


def quiet() -> Progress:
    return Progress(Console(quiet=True), "steps")


def config_of(work_dir: Path, output: Path, method: str = "medusa", **changes: Any) -> RunConfig:
    config = RunConfig(
        method=method,
        target=work_dir / "target",
        data=(work_dir / "data.npy",),
        output=output,
        head=HEAD,
        optimization=OptimizationConfig(steps=4, batch_size=4, warmup_steps=1),
        seq_len=24,
        checkpoint_every=2,
    )
    return replace(config, **changes)


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [(method, "adamw") for method in HEAD_METHODS]
    + [(method, "muon") for method in HEAD_METHODS if method != "mlp_speculator"],
)
def test_every_method_goes_on_to_the_bit(work_dir: Path, method: str, optimizer: str) -> None:
    """In one process: three steps, state, three more; a new trainer from that state takes the same three."""
    options = OptimizationConfig(steps=6, batch_size=4, accumulation=2, warmup_steps=2, optimizer=optimizer)
    target = FrozenTarget(work_dir / "target")
    windows = load_windows([work_dir / "data.npy"], RowEncoder(work_dir), VOCAB_SIZE, 24)

    class NotedSource(BatchSource):
        def batch(self, index: int) -> Batch:
            asked.append(index)
            return super().batch(index)

    def new_trainer() -> HeadTrainer:
        objective = build_objective(method, HEAD, target, windows.token_counts(VOCAB_SIZE), seed=1)
        source = NotedSource(windows, 4, seed=1)
        return HeadTrainer(options, make_accelerator(options, "cpu"), objective, target, source)

    asked: list[int] = []
    first, second = new_trainer(), new_trainer()
    losses = [first.train_step().loss for _ in range(3)]
    save_checkpoint(work_dir / f"bits-{method}-{optimizer}", 3, first.state() | {"settings": "{}"})
    losses += [first.train_step().loss for _ in range(3)]
    second.load_state(load_checkpoint(latest_checkpoint(work_dir / f"bits-{method}-{optimizer}")))
    assert [second.train_step().loss for _ in range(3)] == losses[3:]
    assert same_tree(first.state(), second.state())
    assert len(set(losses)) == 6
    assert asked == [*range(12), *range(6, 12)]


@pytest.mark.parametrize("method", [name for name in HEAD_METHODS if name != "draft_model"])
def test_what_is_exported_is_recognised(work_dir: Path, tmp_path: Path, method: str) -> None:
    config = config_of(work_dir, tmp_path / "run", method)
    model_dir = run(config, quiet())
    assert recognise(model_dir) == method
    # `export` writes the same again from the checkpoint, and any other dtype.
    assert export_run(config.output, config.target, tmp_path / "again", torch.bfloat16, str(config.target)) == 4
    assert (tmp_path / "again/model.safetensors").read_bytes() == (model_dir / "model.safetensors").read_bytes()
    folders = ["--run", str(config.output), "--target", str(config.target), "--output", str(tmp_path / "wide")]
    done = CliRunner().invoke(app, ["export", *folders, "--dtype", "float32", "--target-name", "name", "--json"])
    assert json.loads(done.stdout) == {"output": str(tmp_path / "wide"), "step": 4}
    for name, tensor in load_file(tmp_path / "wide/model.safetensors").items():
        assert tensor.dtype != torch.bfloat16
        assert torch.equal(
            tensor.to(torch.bfloat16), load_file(model_dir / "model.safetensors")[name].to(torch.bfloat16)
        )


def test_an_eagle_head_has_no_bias_that_vllm_would_not_read(work_dir: Path, tmp_path: Path) -> None:
    """Unless it is asked for; what version 0.1 trained has one, and its checkpoints do not say so."""
    config = config_of(work_dir, tmp_path / "run", "eagle")
    run(config, quiet())
    assert "fc.bias" not in load_file(config.output / "model" / "model.safetensors")
    older = replace(config, output=tmp_path / "older", head=replace(HEAD, fc_bias=True))
    run(older, quiet())
    path = latest_checkpoint(older.output)
    state = load_checkpoint(path)
    settings = json.loads(state["settings"])
    del settings["head"]["fc_bias"]
    save_checkpoint(older.output, state["step"], state | {"settings": json.dumps(settings)})
    export_run(older.output, older.target, tmp_path / "out", torch.bfloat16, "name")
    assert "fc.bias" in load_file(tmp_path / "out" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"head\.fc_bias=True, this run has False"):
        run(replace(config, output=older.output, resume=True), quiet())
    run(replace(older, resume=True), quiet())


def test_a_draft_model_is_a_whole_checkpoint(work_dir: Path, tmp_path: Path) -> None:
    config = config_of(work_dir, tmp_path / "run", "draft_model", head=replace(HEAD, num_attention_heads=2))
    model_dir = run(config, quiet())
    assert recognise(model_dir) == "draft_model"
    assert (model_dir / "tokenizer.json").is_file()
    # It can be gone on with: the next run starts from it.
    further = config_of(work_dir, tmp_path / "next", "draft_model", head=HeadOptions(init=model_dir))
    assert recognise(run(further, quiet())) == "draft_model"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_len": 20}, "seq_len=24, this run has 20"),
        ({"head": replace(HEAD, num_heads=3)}, "head.num_heads=2, this run has 3"),
        ({"count_prompts": True}, "count_prompts=False, this run has True"),
        ({"data": ("held-out.npy",)}, " data="),
        ({"optimization": OptimizationConfig(steps=5, batch_size=4, warmup_steps=1)}, "optimization.steps=4"),
    ],
)
def test_a_run_is_resumed_with_its_own_settings_only(
    work_dir: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    config = config_of(work_dir, tmp_path / "run")
    run(config, quiet())
    if "data" in changes:
        changes = {"data": tuple(work_dir / name for name in changes["data"])}
    before = (config.output / "run.json").read_bytes()
    with pytest.raises(CheckpointError, match=words):
        run(replace(config, resume=True, **changes), quiet())
    assert (config.output / "run.json").read_bytes() == before


def test_another_target_is_refused(work_dir: Path, tmp_path: Path) -> None:
    config = config_of(work_dir, tmp_path / "run")
    run(config, quiet())
    other = write_target(tmp_path / "other")
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1e-3}))
    with pytest.raises(CheckpointError, match="target="):
        run(replace(config, resume=True, target=other), quiet())
    with pytest.raises(CheckpointError, match="target="):
        export_run(config.output, other, tmp_path / "out", torch.bfloat16, "name")


def test_checkpoints_that_cannot_be_used(work_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        export_run(tmp_path, work_dir / "target", tmp_path / "out", torch.bfloat16, "name")
    folder = save_checkpoint(tmp_path, 3, {"step": 3})
    with pytest.raises(CheckpointError, match="is not a checkpoint of"):
        export_run(tmp_path, work_dir / "target", tmp_path / "out", torch.bfloat16, "name")
    (folder / "state.pt").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="cannot be read"):
        export_run(tmp_path, work_dir / "target", tmp_path / "out", torch.bfloat16, "name")


def test_a_run_that_diverges_ends_before_its_weights_do(work_dir: Path, tmp_path: Path) -> None:
    wild = OptimizationConfig(steps=40, batch_size=4, warmup_steps=0, lr=1e18)
    config = config_of(work_dir, tmp_path / "run", "mlp_speculator", optimization=wild, checkpoint_every=1)
    with pytest.raises(DivergenceError, match="is not finite"):
        run(config, quiet())
    assert not (config.output / "model").exists()


def test_the_two_latest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (2, 10, 100):
        save_checkpoint(tmp_path, step, {"step": step})
    assert [load_checkpoint(path)["step"] for path in checkpoints(tmp_path)] == [10, 100]
    save_checkpoint(tmp_path, 100, {"step": 100, "again": True})
    assert load_checkpoint(latest_checkpoint(tmp_path))["again"]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"optimization": OptimizationConfig(steps=0)}, SettingError, "--steps must be at least 1"),
        ({"optimization": OptimizationConfig(lr=0.0)}, SettingError, "--lr must be above 0"),
        ({"optimization": OptimizationConfig(lr=float("nan"))}, SettingError, "--lr must be above 0"),
        ({"optimization": OptimizationConfig(optimizer="sgd")}, SettingError, "--optimizer 'sgd': must be one of"),
        ({"optimization": OptimizationConfig(precision="int8")}, SettingError, "--precision 'int8': must be one of"),
        ({"method": "mlp_speculator", "optimization": MUON}, SettingError, "--optimizer muon: this head has no"),
        ({"export_dtype": "int8"}, SettingError, "--dtype 'int8': must be one of"),
        ({"log_every": 0}, SettingError, "--log-every must be at least 1"),
        ({"data": (Path("absent.npy"),)}, DataError, "absent.npy does not exist"),
        ({"target": Path("absent")}, ConfigError, "--target: absent is not a checkpoint folder"),
    ],
)
def test_settings_that_cannot_be(
    work_dir: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        run(config_of(work_dir, tmp_path / "run", **changes), quiet())


def test_a_missing_package_is_named() -> None:
    code = "import sys; sys.modules['accelerate'] = None\nfrom outrider.training.commands.app import app\n"
    code += (
        "app(['train', '--method', 'eagle', '--target', 'models/demo-target', '--data', 'README.md', '--output', 'o'])"
    )
    command = [sys.executable, "-c", code]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert outcome.returncode == 2
    assert "this needs package accelerate: pip install 'outrider[engine,train]'" in outcome.stderr.replace("\n", " ")


def test_the_client_hands_over() -> None:
    handed = [sys.executable, "-m", "outrider.client.cli.main", "train", "--help"]
    outcome = subprocess.run(handed, capture_output=True, text=True, timeout=280, check=True)
    assert "Usage: outrider train" in outcome.stdout
    for name in ("prepare-data", "train", "export", "evaluate"):
        assert name in outcome.stdout
        assert "--json" in CliRunner().invoke(app, [name, "--help"]).stdout
