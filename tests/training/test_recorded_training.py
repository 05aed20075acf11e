"""Training on recorded hidden states is training on the target, without running it. Oracle: the same run with it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import LlamaForCausalLM

from outrider.drafting.recorded_states import RecordedSession, next_path, write_states
from outrider.engine.model.weights_digest import weights_digest
from outrider.shared.errors import ConfigError
from outrider.training import train
from outrider.training.errors import CheckpointError, DataError, SettingError
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.options import HeadOptions
from outrider.training.progress import Progress
from outrider.training.run_config import OptimizationConfig, RunConfig
from outrider.training.run_record import read_log
from outrider.training.train import run
from tests.training.tiny import HEAD_METHODS, NUM_LAYERS, VOCAB_SIZE, write_target

LAYERS = (2, 3, NUM_LAYERS)
STEPS = OptimizationConfig(steps=4, batch_size=4, precision="fp32", warmup_steps=1)
HEAD = HeadOptions(num_heads=2, inner_dim=16, ttt_steps=2, draft_vocab_size=0, feature_noise=0.0)


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, answers of different lengths, and transformers' hidden states of all but the last two."""
    folder = tmp_path_factory.mktemp("recorded")
    model = LlamaForCausalLM.from_pretrained(write_target(folder / "target")).eval()
    rng = np.random.default_rng(5)
    texts = [rng.integers(1, VOCAB_SIZE, length).tolist() for length in rng.integers(15, 27, 18)]
    rows = [{"prompt_token_ids": text[:3], "token_ids": text[3:]} for text in texts]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:-2]))
    (folder / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sessions = []
    for row in rows[:-2]:
        ids = np.array([*row["prompt_token_ids"], *row["token_ids"]], dtype=np.int32)[:-1]  # the last is not computed
        with torch.no_grad():
            states = model(torch.from_numpy(ids).long()[None], output_hidden_states=True).hidden_states
        sessions.append(RecordedSession(ids, torch.cat([states[layer][0] for layer in LAYERS], dim=-1)))
    (folder / "states").mkdir()
    digest = weights_digest(folder / "target")
    for part in (sessions[:9], sessions[9:]):
        write_states(next_path(folder / "states"), part, LAYERS, digest)
    return folder


def config_of(work_dir: Path, output: Path, method: str = "eagle3", **changes: Any) -> RunConfig:
    config = RunConfig(
        method, work_dir / "target", (work_dir / "data.jsonl",), output, HEAD, STEPS, log_every=1, threads=1
    )
    return replace(config, **{"hidden_states": work_dir / "states"} | changes)


def quiet() -> Progress:
    return Progress(Console(quiet=True), "test")


@pytest.mark.parametrize("method", [name for name in HEAD_METHODS if name != "draft_model"])
def test_the_losses_are_those_of_a_run_with_the_target(
    work_dir: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = replace(HEAD, feature_layers=(2, 3) if method in ("eagle3", "dspark", "dflash") else ())
    run(config_of(work_dir, tmp_path / "with", method, head=head, hidden_states=None), quiet())

    def not_run(*_: object) -> None:
        raise AssertionError("the target is run")

    monkeypatch.setattr(FrozenTarget, "view", not_run)
    run(config_of(work_dir, tmp_path / "without", method, head=head), quiet())
    losses = [[row["loss"] for row in read_log(tmp_path / name)] for name in ("with", "without")]
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=2e-5)


def test_samples_without_are_left_out_and_counted(work_dir: Path, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    config = config_of(work_dir, tmp_path / "run", head=replace(HEAD, feature_layers=(2, 3)))
    run(replace(config, data=(work_dir / "all.jsonl",)), Progress(console, "test"))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "the target is not run; 2 samples without are left out" in said
    assert "16 windows" in said


def test_what_does_not_fit_is_refused(work_dir: Path, tmp_path: Path) -> None:
    read = replace(HEAD, feature_layers=(2, 3))
    run(config_of(work_dir, tmp_path / "run", head=read), quiet())
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"head": replace(HEAD, feature_layers=(1, 3))}, SettingError, r"it has layers \[2, 3, 6\], this head reads"),
        ({"hidden_states": tmp_path / "none"}, ConfigError, "record some with --record-hidden-states"),
        ({"data": (_other_text(tmp_path),)}, DataError, r"with recorded hidden states \(1 without\)"),
        (
            {"output": tmp_path / "run", "resume": True, "hidden_states": None, "head": read},
            CheckpointError,
            "was made with hidden_states=True, this run has False",
        ),
    ]
    for changes, error, words in cases:
        with pytest.raises(error, match=words):
            run(replace(config_of(work_dir, tmp_path / "other"), **changes), quiet())


def _other_text(folder: Path) -> Path:
    path = folder / "other.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": [1], "token_ids": [2, 3, 4, 5, 6]}) + "\n")
    return path


@pytest.mark.parametrize(("can_multiply", "precision"), [(True, "bf16"), (False, "fp32")])
def test_the_precision_is_one_that_the_machine_is_fast_at(
    monkeypatch: pytest.MonkeyPatch, can_multiply: bool, precision: str
) -> None:
    capabilities = {"avx2": True, "avx512_bf16": can_multiply, "amx_bf16": False, "cpu_name": "bf16"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    auto = OptimizationConfig()
    assert auto.precision == "auto"
    assert train.with_precision(auto, "cpu", None).precision == precision
    assert train.with_precision(auto, "cpu", {"optimization": {"precision": "bf16"}}).precision == "bf16"
    assert train.with_precision(replace(auto, precision="bf16"), "cpu", None).precision == "bf16"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_run_has_its_own_precision(work_dir: Path, tmp_path: Path, precision: str) -> None:
    """Runs of one process may differ: accelerate itself keeps to the precision that it was first asked for."""
    optimization = replace(STEPS, steps=1, precision=precision)
    output = tmp_path / "run"
    run(config_of(work_dir, output, optimization=optimization), quiet())
    record = json.loads((output / "run.json").read_text())
    assert record["optimization"]["precision"] == precision
