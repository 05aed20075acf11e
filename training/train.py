"""A whole training run: load target and data, resume or begin, train, log, checkpoint, export.

    OUTPUT/run.json           settings, and fingerprints of target and data
    OUTPUT/train.jsonl        loss and acceptance estimates per depth; cut back to the checkpoint when resumed
    OUTPUT/checkpoint-*/      the two latest
    OUTPUT/model/             the finished head in its public layout

Not here: the step itself (head_trainer). Run: `outrider train train --help`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console

from training.errors import CheckpointError, SettingError
from training.frozen_target import FrozenTarget
from training.head_data import BatchSource, load_windows
from training.head_trainer import HeadTrainer, OptimizationConfig, make_accelerator
from training.heads.interface import Batch
from training.heads.options import HeadOptions
from training.heads.registry import build_objective
from training.progress import Progress
from training.run_record import Interrupted, Meter, RunRecord, stop_requests
from training.run_state import checkpoints, latest_checkpoint, load_checkpoint, require_same
from training.tokenize_rows import RowEncoder

_EXPORT_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class RunConfig:
    """One run. Only the fields of the first block change what comes out."""

    method: str
    target: Path
    data: tuple[Path, ...]
    output: Path
    head: HeadOptions = field(default_factory=HeadOptions)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    seq_len: int = 512
    count_prompts: bool = False

    eval_data: tuple[Path, ...] = ()
    eval_batches: int = 8
    eval_every: int = 200
    checkpoint_every: int = 100
    log_every: int = 10
    export_dtype: str = "bfloat16"
    target_name: str = ""
    device: str = "cpu"
    threads: int = 0
    resume: bool = False

    def check(self) -> None:
        """Raises SettingError naming the option."""
        self.head.check(self.method)
        self.optimization.check()
        for name in ("eval_batches", "eval_every", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise SettingError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        export_dtype(self.export_dtype)


def export_dtype(name: str) -> torch.dtype:
    """Raises SettingError listing the choices."""
    if name not in _EXPORT_DTYPES:
        raise SettingError(f"--dtype {name!r}: must be one of {', '.join(_EXPORT_DTYPES)}")
    return _EXPORT_DTYPES[name]


def run(config: RunConfig, progress: Progress) -> Path:
    """Train to the end and export; returns the folder of the finished head.

    Raises SettingError, DataError, CheckpointError, DivergenceError; Interrupted after SIGINT or SIGTERM, with a
    checkpoint written.
    """
    config.check()
    if checkpoints(config.output) and not config.resume:
        raise CheckpointError(f"{config.output} holds a run already: --resume goes on with it; or remove it")
    if config.threads:
        torch.set_num_threads(config.threads)
    accelerator = make_accelerator(config.optimization, config.device)
    is_main = accelerator.is_main_process
    if not is_main:
        progress = Progress(Console(quiet=True), config.method)
    trainer, eval_batches, settings = _prepare(config, accelerator, progress)
    if config.resume and checkpoints(config.output):
        path = latest_checkpoint(config.output)
        state = load_checkpoint(path)
        require_same(path, json.loads(state["settings"]), settings)
        trainer.load_state(state)
        progress.say(f"resumed {path} at step {trainer.step}")
    model_dir = config.output / "model"
    with RunRecord(config.output, settings, trainer.step, config.optimization.steps, progress, is_main) as record:
        _train(config, trainer, eval_batches, record)
    if is_main:
        trainer.objective.export(model_dir, export_dtype(config.export_dtype), config.target_name or str(config.target))
    accelerator.wait_for_everyone()
    accelerator.end_training()  # the group ends here and not in whatever order the interpreters do
    return model_dir


def _prepare(
    config: RunConfig, accelerator: Accelerator, progress: Progress
) -> tuple[HeadTrainer, list[Batch], dict[str, Any]]:
    # Without autocast one dtype must do for target and head.
    dtype = "auto" if config.optimization.precision == "bf16" else torch.float32
    target = FrozenTarget(config.target, dtype, str(accelerator.device))
    encode = RowEncoder(config.target)
    windows = load_windows(config.data, encode, target.vocab_size, config.seq_len, config.count_prompts)
    counts = windows.token_counts(target.vocab_size)
    objective = build_objective(config.method, config.head, target, counts, config.optimization.seed)
    source = BatchSource(windows, config.optimization.batch_size, config.optimization.seed)
    eval_batches: list[Batch] = []
    if config.eval_data:
        held_out = load_windows(config.eval_data, encode, target.vocab_size, config.seq_len, config.count_prompts)
        eval_source = BatchSource(held_out, min(config.optimization.batch_size, len(held_out)), seed=0)
        num_batches = min(config.eval_batches, eval_source.batches_per_epoch)
        eval_batches = [eval_source.batch(index) for index in range(num_batches)]
    num_tokens = int((windows.ends - windows.starts).sum())
    num_parameters = sum(parameter.numel() for parameter in objective.parameters() if parameter.requires_grad)
    progress.say(
        f"{config.method}: {num_parameters:,} parameters to train; {len(windows):,} windows, {num_tokens:,} tokens, "
        f"{config.optimization.steps * config.optimization.accumulation / source.batches_per_epoch:.2f} epochs"
    )
    settings = {
        "method": config.method,
        "head": _plain(asdict(config.head)),
        "optimization": asdict(config.optimization),
        "seq_len": config.seq_len,
        "count_prompts": config.count_prompts,
        "target": target_fingerprint(config.target),
        "data": windows.fingerprint(),
        "processes": accelerator.num_processes,
    }
    return HeadTrainer(config.optimization, accelerator, objective, target, source), eval_batches, settings


def target_fingerprint(path: Path) -> str:
    """Hash of a target's config and of its weight files' sizes and headers: cheap, and another model has another."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as weights:
            digest.update(f"{file.name}:{file.stat().st_size}".encode() + weights.read(1 << 20))
    return digest.hexdigest()[:16]


def _train(config: RunConfig, trainer: HeadTrainer, eval_batches: list[Batch], record: RunRecord) -> None:
    steps, meter = config.optimization.steps, Meter()
    with stop_requests() as received:
        while trainer.step < steps:
            meter.add(trainer.train_step())
            step, is_last = trainer.step, trainer.step == steps
            if step % config.log_every == 0 or is_last:
                record.train_row(step, meter.row(config.optimization.lr))
                meter = Meter()
            if eval_batches and (step % config.eval_every == 0 or is_last):
                record.eval_row(step, trainer.evaluate(eval_batches).means())
            must_stop = trainer.is_true_anywhere(bool(received))
            if step % config.checkpoint_every == 0 or is_last or must_stop:
                record.checkpoint(step, trainer.state)
                trainer.accelerator.wait_for_everyone()
            if must_stop and not is_last:
                raise Interrupted(f"stopped at step {step} of {steps}; --resume goes on from there")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: a resumed run compares with what was read."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain
