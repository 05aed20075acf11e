"""A whole training run: load target and data, start or resume, train, log, checkpoint, export.

    OUTPUT/run.json           settings, and fingerprints of target and data
    OUTPUT/train.jsonl        loss and acceptance estimates per depth; truncated to the checkpoint on resume
    OUTPUT/checkpoint-*/      the latest two
    OUTPUT/model/             the finished head in its public layout

Not here: the step itself (head_trainer.py). Run: `outrider train train --help`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console

from outrider.drafting.recorded_states import RecordedStates
from outrider.engine.model.weights_digest import weights_digest
from outrider.shared.checkpoint.file_names import linked_parts, weight_files
from outrider.training.batch_fit import fitted, free_bytes, window_bytes
from outrider.training.data.head_data import BatchSource, TokenWindows, load_windows
from outrider.training.data.tokenize_rows import RowEncoder
from outrider.training.errors import CheckpointError, SettingError
from outrider.training.frozen_target import FrozenTarget
from outrider.training.head_trainer import HeadTrainer, make_accelerator
from outrider.training.heads.interface import Batch, Objective, TargetView
from outrider.training.heads.registry import build_objective
from outrider.training.optim import multiplies_bfloat16
from outrider.training.progress import Progress
from outrider.training.run_config import OptimizationConfig, RunConfig, check_export_dtype
from outrider.training.run_record import Interrupted, Meter, RunRecord, stop_requests
from outrider.training.run_state import checkpoints, latest_checkpoint, load_checkpoint, require_same, settings_of
from outrider.training.watch import Watch


def torch_dtype(name: str) -> torch.dtype:
    """Returns the dtype of this name. Raises SettingError that lists the choices."""
    check_export_dtype(name)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def run(config: RunConfig, progress: Progress, watch: Watch | None = None) -> Path:
    """Trains to the end, or until `watch` says that it may end, and exports; returns the finished head's folder.

    Raises SettingError, DataError, CheckpointError, DivergenceError; Interrupted after SIGINT or SIGTERM, with a
    checkpoint written.
    """
    config.check()
    if checkpoints(config.output) and not config.resume:
        raise CheckpointError(f"{config.output} already has a run: continue it with --resume, or remove it")
    if config.threads:
        torch.set_num_threads(config.threads)
    state = saved = None
    if config.resume and checkpoints(config.output):
        path = latest_checkpoint(config.output)
        state = load_checkpoint(path)
        saved = settings_of(state)
    config = replace(config, optimization=with_precision(config.optimization, config.device, saved))
    accelerator = make_accelerator(config.optimization, config.device)
    is_main = accelerator.is_main_process
    if not is_main:
        progress = Progress(Console(quiet=True), config.method)
    trainer, eval_batches, settings = _prepare(config, accelerator, progress, saved)
    if state is not None and saved is not None:
        require_same(path, saved, settings)
        trainer.load_state(state)
        progress.say(f"resumed {path} at step {trainer.step}")
    model_dir = config.output / "model"
    with RunRecord(config.output, settings, trainer.step, config.optimization.steps, progress, is_main) as record:
        _train(config, trainer, eval_batches, record, watch)
    if is_main:
        trainer.objective.export(model_dir, torch_dtype(config.export_dtype), config.target_name or str(config.target))
    accelerator.wait_for_everyone()
    accelerator.end_training()  # ends the process group here, not whenever each interpreter exits
    return model_dir


def with_precision(optimization: OptimizationConfig, device: str, saved: dict[str, Any] | None) -> OptimizationConfig:
    """Returns `optimization` with the precision of the run that is resumed, or the one that this machine is fast at."""
    if optimization.precision != "auto":
        return optimization
    if saved is not None:
        return replace(optimization, precision=saved["optimization"]["precision"])
    device_type = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    return replace(optimization, precision="bf16" if multiplies_bfloat16(device_type) else "fp32")


def _recorded(config: RunConfig, target: FrozenTarget) -> RecordedStates | None:
    """Returns the hidden states that stand in for the target's. Raises ConfigError, SettingError."""
    if config.hidden_states is None:
        return None
    recorded = RecordedStates(config.hidden_states, weights_digest(config.target))
    if recorded.layers[-1] != target.num_layers:
        raise SettingError(f"--hidden-states {config.hidden_states}: the last layer is not the final norm's output")
    return recorded


def _prepare(
    config: RunConfig, accelerator: Accelerator, progress: Progress, saved: dict[str, Any] | None
) -> tuple[HeadTrainer, list[Batch], dict[str, Any]]:
    # Without autocast, target and head share one dtype.
    dtype = "auto" if config.optimization.precision == "bf16" else torch.float32
    target = FrozenTarget(config.target, dtype, str(accelerator.device))
    encode = RowEncoder(config.target)
    recorded = _recorded(config, target)
    windows = load_windows(config.data, encode, target.vocab_size, config.seq_len, config.count_prompts, recorded)
    counts = windows.token_counts(target.vocab_size)
    objective = build_objective(config.method, config.head, target, counts, config.optimization.seed)
    if recorded is not None and not set(objective.feature_layers) <= set(recorded.layers):
        raise SettingError(
            f"--hidden-states {config.hidden_states}: it has layers {list(recorded.layers)}, this head reads "
            f"{list(objective.feature_layers)}; train without it, or with --feature-layer"
        )
    optimization = config.optimization
    if config.fit_batch:
        optimization = _fit_batch(optimization, accelerator, objective, target, windows, progress, saved)
    source = BatchSource(windows, optimization.batch_size, optimization.seed)
    eval_batches: list[Batch] = []
    if config.eval_data:
        held_out = load_windows(config.eval_data, encode, target.vocab_size, config.seq_len, config.count_prompts)
        eval_source = BatchSource(held_out, min(optimization.batch_size, len(held_out)), seed=0)
        num_batches = min(config.eval_batches, eval_source.batches_per_epoch)
        eval_batches = [eval_source.batch(index) for index in range(num_batches)]
    if recorded is not None:
        left_out = f"; {windows.num_without:,} samples without are left out" if windows.num_without else ""
        progress.say(f"hidden states are read from {config.hidden_states}, the target is not run{left_out}")
    num_tokens = int((windows.ends - windows.starts).sum())
    num_parameters = sum(parameter.numel() for parameter in objective.parameters() if parameter.requires_grad)
    progress.say(
        f"{config.method}: {num_parameters:,} parameters to train; {len(windows):,} windows, {num_tokens:,} tokens, "
        f"{optimization.steps * optimization.accumulation / source.batches_per_epoch:.2f} epochs"
    )
    settings = {
        "method": config.method,
        "head": _plain(asdict(config.head)),
        "optimization": asdict(optimization),
        "seq_len": config.seq_len,
        "count_prompts": config.count_prompts,
        "target": target_fingerprint(config.target),
        "data": windows.fingerprint(),
        "hidden_states": config.hidden_states is not None,
        "processes": accelerator.num_processes,
    }
    return HeadTrainer(optimization, accelerator, objective, target, source), eval_batches, settings


def _fit_batch(
    optimization: OptimizationConfig,
    accelerator: Accelerator,
    objective: Objective,
    target: FrozenTarget,
    windows: TokenWindows,
    progress: Progress,
    saved: dict[str, Any] | None,
) -> OptimizationConfig:
    """Returns `optimization` with batches that fit, or those of the run that is resumed."""
    if saved is not None:
        batch_size, accumulation = (saved["optimization"][name] for name in ("batch_size", "accumulation"))
        is_same = batch_size * accumulation == optimization.batch_size * optimization.accumulation
        return replace(optimization, batch_size=batch_size, accumulation=accumulation) if is_same else optimization
    free = free_bytes(accelerator)
    if free is None:
        return optimization

    def view(batch: Batch) -> TargetView:
        return target.view_of(batch, objective.feature_layers)

    taken = window_bytes(objective, view, windows, accelerator)
    optimization, line = fitted(optimization, objective, taken, free, accelerator.num_processes)
    progress.say(line)
    return optimization


def target_fingerprint(path: Path) -> str:
    """Hashes a target's config and its weight files' sizes and beginnings: fast, and different for each model."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in linked_parts(path) or weight_files(path):
        with file.open("rb") as weights:
            digest.update(f"{file.name}:{file.stat().st_size}".encode() + weights.read(1 << 20))
    return digest.hexdigest()[:16]


def _train(
    config: RunConfig, trainer: HeadTrainer, eval_batches: list[Batch], record: RunRecord, watch: Watch | None
) -> None:
    steps, meter = config.optimization.steps, Meter()
    with stop_requests() as received:
        while trainer.step < steps:
            meter.add(trainer.train_step())
            step = trainer.step
            is_last = step == steps or (watch is not None and watch.time_is_up)
            if step % config.log_every == 0 or is_last:
                record.train_row(step, meter.row(config.optimization.lr))
                meter = Meter()
            if eval_batches and (step % config.eval_every == 0 or is_last):
                means: dict[str, Any] = {**trainer.evaluate(eval_batches).means()}
                if watch is not None:
                    means["tokens_per_round"] = watch.measure(trainer)
                    is_last = is_last or watch.is_enough
                record.eval_row(step, means)
            must_stop = trainer.is_true_anywhere(bool(received))
            if step % config.checkpoint_every == 0 or is_last or must_stop:
                record.checkpoint(step, trainer.state)
                trainer.accelerator.wait_for_everyone()
            if must_stop and not is_last:
                raise Interrupted(f"stopped at step {step} of {steps}; continue with --resume")
            if is_last:
                return


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Returns values as JSON returns them, since a resumed run compares with what it reads."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain
