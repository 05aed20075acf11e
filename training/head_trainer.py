"""Trains a draft head against its frozen target; a killed and resumed run ends with the same bits.

Everything a step depends on is restored or is a function of the step: batches and noise come from (seed, index),
weights and optimizer from the checkpoint. Uses accelerate, not transformers' Trainer: it places the model, casts and
synchronizes gradients, and leaves the loop and its state here, where they can be restored exactly.
Not here: objectives (training.heads), data files (data/head_data.py), options (commands/train.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState

from outrider.training.data.head_data import BatchSource
from outrider.training.errors import DivergenceError, SettingError
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.interface import Batch, DraftScores, Objective, TargetView
from outrider.training.optim import (
    CosineSchedule,
    HybridOptimizer,
    ScheduledOptimizer,
    has_matrices_inside_layers,
    scheduled_adamw,
)
from outrider.training.run_config import OptimizationConfig


@dataclass(frozen=True)
class StepReport:
    """One optimizer step: mean loss of its batches, estimates on its training tokens, gradient norm before clipping."""

    loss: float
    grad_norm: float
    lr_factor: float
    scores: DraftScores
    num_tokens: int


class HeadTrainer:
    """A run in progress. step: completed optimizer steps. `state` and `load_state` transfer all it depends on."""

    def __init__(
        self,
        config: OptimizationConfig,
        accelerator: Accelerator,
        objective: Objective,
        target: FrozenTarget,
        source: BatchSource,
    ) -> None:
        self.config, self.accelerator, self.target, self._source = config, accelerator, target, source
        self.objective = objective
        self._optimizer = _optimizer(objective, config)
        self._model: Any = accelerator.prepare(objective)
        self._schedule = CosineSchedule(config.warmup_steps, config.steps)
        self.step = 0

    def train_step(self) -> StepReport:
        """Takes one optimizer step. Raises DivergenceError, with the weights unchanged."""
        config, accelerator = self.config, self.accelerator
        self._model.train()
        losses: list[torch.Tensor] = []
        scores: list[DraftScores] = []
        num_tokens = 0
        for micro in range(config.accumulation):
            index = self.step * config.accumulation + micro
            batch = self._share(self._source.batch(index))
            num_tokens += int(batch.token_ids.numel()) * accelerator.num_processes
            if micro < config.accumulation - 1:
                with accelerator.no_sync(self._model):
                    loss, score = self._backward(batch, index)
            else:
                loss, score = self._backward(batch, index)
            losses.append(loss)
            scores.append(score)
        trained = [parameter for parameter in self.objective.parameters() if parameter.requires_grad]
        grad_norm = float(accelerator.clip_grad_norm_(trained, config.max_grad_norm) or 0.0)
        if not math.isfinite(grad_norm):  # every process has the same norm, so all end here
            raise DivergenceError(f"the gradient of step {self.step + 1} is not finite; start again with a lower --lr")
        lr_factor = self._schedule.factor(self.step)
        self._optimizer.step(lr_factor)
        self.step += 1
        mean_loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
        return StepReport(float(mean_loss), grad_norm, lr_factor, self._summed(scores), num_tokens)

    def _backward(self, batch: Batch, index: int) -> tuple[torch.Tensor, DraftScores]:
        noise = noise_generator(self.config.seed, index, self.accelerator.process_index)
        loss, scores = self._model(batch, self._view(batch), noise)
        self.accelerator.backward(loss / self.config.accumulation)
        return loss.detach(), scores

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> DraftScores:
        """Returns estimates over `batches`, without noise, at the depth used in service."""
        self._model.eval()
        noise = noise_generator(0, 0, 0)
        scores = []
        for batch in batches:
            share = self._share(batch)
            scores.append(self._model(share, self._view(share), noise)[1])
        return self._summed(scores)

    def _view(self, batch: Batch) -> TargetView:
        with self.accelerator.autocast():
            return self.target.view_of(batch, self.objective.feature_layers)

    def _share(self, batch: Batch) -> Batch:
        """Returns this process's rows, on its device."""
        accelerator = self.accelerator
        return batch.part(slice(accelerator.process_index, None, accelerator.num_processes), accelerator.device)

    def _summed(self, scores: Sequence[DraftScores]) -> DraftScores:
        total = scores[0]
        for score in scores[1:]:
            total = total + score
        columns = torch.stack([total.agreement, total.overlap, total.num_positions])
        summed = self.accelerator.reduce(columns, reduction="sum")
        return DraftScores(summed[0], summed[1], summed[2])

    def is_true_anywhere(self, flag: bool) -> bool:
        """Returns whether `flag` is true in any process: a signal may reach only some, or at different steps."""
        if self.accelerator.num_processes == 1:
            return flag
        total = self.accelerator.reduce(torch.tensor(float(flag), device=self.accelerator.device), reduction="sum")
        return bool(total > 0)

    def state(self) -> dict[str, Any]:
        """Returns weights, optimizer, random state and step: tensors and plain values."""
        return {
            "step": self.step,
            "head": self.objective.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores `state`. Raises RuntimeError or KeyError when the shapes differ from this run's."""
        self.objective.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.step = int(state["step"])


def noise_generator(seed: int, index: int, rank: int) -> torch.Generator:
    """Returns the random numbers of one batch: a function of the run's seed, the batch's index and the process."""
    word = np.random.SeedSequence([seed, index, rank]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(word) & (2**63 - 1))


def make_accelerator(config: OptimizationConfig, device: str) -> Accelerator:
    """Returns accelerate's context; raises SettingError for a batch that the processes cannot share equally."""
    # Frozen tensors are buffers, equal in every process: broadcasting them before each step would dominate its cost.
    handlers = [DistributedDataParallelKwargs(broadcast_buffers=False)]
    precision = "bf16" if config.precision == "bf16" else "no"
    AcceleratorState._reset_state()  # accelerate keeps to a process's first precision; here each run has its own
    accelerator = Accelerator(mixed_precision=precision, cpu=device == "cpu", kwargs_handlers=handlers)
    if config.batch_size % accelerator.num_processes:
        raise SettingError(
            f"--batch-size {config.batch_size}: must be a multiple of the {accelerator.num_processes} processes"
        )
    return accelerator


def _optimizer(objective: Objective, config: OptimizationConfig) -> ScheduledOptimizer:
    if config.optimizer == "muon":
        if not has_matrices_inside_layers(objective):
            raise SettingError("--optimizer muon: this head has no matrices inside layers; take adamw")
        return HybridOptimizer(objective, config.lr, config.lr, config.weight_decay)
    return scheduled_adamw(objective, config.lr, config.weight_decay)
