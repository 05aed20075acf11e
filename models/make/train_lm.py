"""Trains the demo family's targets, a small Llama and a small hybrid, on the corpus, on CPU, resumable bit for bit.

Not a general trainer: one process, one device, bf16 autocast over fp32 weights. The checkpoint has weights, optimizer
state, random state and the step; batches are a function of the step, so a killed and resumed run has the same loss
curve. Run: `python -m models.make.train_lm --help`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from models.make.family import export_model, hybrid_config, llama_config
from models.make.lm_data import BlockSampler, load_token_ids
from outrider.shared.machine.memory import use_huge_pages
from outrider.training.errors import CheckpointError, SettingError
from outrider.training.heads.draft_model import init_from_target
from outrider.training.optim import HybridOptimizer, Schedule


@dataclass(frozen=True)
class TrainConfig:
    """The settings of one run. Lengths in tokens, counts in optimizer steps.

    long_from: the step at which sequences grow to `long_seq_len`.
    """

    total_steps: int = 1250
    warmup_steps: int = 60
    decay_from: int = 900
    long_from: int = 1100
    seq_len: int = 512
    long_seq_len: int = 1024
    tokens_per_step: int = 4096
    muon_lr: float = 4e-3
    adamw_lr: float = 4e-3
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    eval_every: int = 100
    checkpoint_every: int = 50
    heldout_sequences: int = 32
    seed: int = 1


# The hybrid learns from a fifth of the target's tokens, and so in smaller steps.
SHAPES: dict[str, tuple[PreTrainedConfig, TrainConfig]] = {
    "target": (
        llama_config(hidden_size=320, num_layers=6, num_heads=5, intermediate_size=832),
        TrainConfig(),
    ),
    "hybrid": (
        hybrid_config(),
        TrainConfig(
            total_steps=480,
            warmup_steps=20,
            decay_from=260,
            long_from=460,
            seq_len=256,
            tokens_per_step=2048,
        ),
    ),
}


def lm_loss(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy in nats of predicting rows[:, 1:] from rows[:, :-1]; rows int64[batch, length]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


class Trainer:
    """A run in progress. `steps()` advances it; `save` and `load` transfer all of its state to and from one file."""

    def __init__(self, config: TrainConfig, model_config: PreTrainedConfig, work_dir: Path) -> None:
        self.config, self.work_dir = config, work_dir
        torch.manual_seed(config.seed)
        self.model = AutoModelForCausalLM.from_config(model_config, attn_implementation="sdpa")
        self.optimizer = HybridOptimizer(self.model, config.muon_lr, config.adamw_lr, config.weight_decay)
        train_ids = load_token_ids(work_dir / "train.bin")
        self.samplers = {
            seq_len: BlockSampler(train_ids, seq_len, config.seed) for seq_len in (config.seq_len, config.long_seq_len)
        }
        heldout = BlockSampler(load_token_ids(work_dir / "heldout.bin"), config.seq_len, seed=0)
        self.heldout_rows = heldout.batch(0, min(config.heldout_sequences, heldout.num_blocks))
        self.step = 0
        self.history: list[dict[str, float]] = []

    def seq_len_at(self, step: int) -> int:
        return self.config.long_seq_len if step >= self.config.long_from else self.config.seq_len

    def steps(self) -> Iterator[float]:
        """Takes one optimizer step per item, until `total_steps`; yields that step's training loss."""
        config = self.config
        while self.step < config.total_steps:
            schedule = Schedule(config.warmup_steps, config.decay_from, config.total_steps)
            seq_len = self.seq_len_at(self.step)
            rows = self.samplers[seq_len].batch(self.step, config.tokens_per_step // seq_len)
            loss = lm_loss(self.model, rows)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
            self.optimizer.step(schedule.factor(self.step))
            self.step += 1
            yield loss.item()

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Returns the mean held-out cross-entropy in nats per token, over a fixed set of sequences."""
        self.model.eval()
        parts = torch.split(self.heldout_rows, 8)
        total = sum(lm_loss(self.model, rows).item() * len(rows) for rows in parts)
        self.model.train()
        return total / len(self.heldout_rows)

    def save(self, path: Path) -> None:
        """Writes everything needed to continue; the old checkpoint stays until the new one is complete."""
        state = {
            "config": asdict(self.config),
            "model_config": self.model.config.to_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.step,
            "history": self.history,
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.rename(path)

    def load(self, path: Path) -> None:
        """Restores a checkpoint's state. Raises CheckpointError for another model or data order."""
        state: dict[str, Any] = torch.load(path, weights_only=True)
        for name in ("seed", "seq_len", "long_seq_len", "tokens_per_step"):
            if state["config"][name] != getattr(self.config, name):
                raise CheckpointError(f"{path} was made with {name}={state['config'][name]}")
        if state["model_config"]["hidden_size"] != self.model.config.hidden_size:
            raise CheckpointError(f"{path} has a model of width {state['model_config']['hidden_size']}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.step, self.history = state["step"], state["history"]


def run_training(trainer: Trainer, checkpoint: Path, console: Console) -> None:
    """Trains to the end with a progress line every 10 steps; held-out loss and checkpoints at their intervals."""
    config = trainer.config
    started, since, tokens = time.monotonic(), trainer.step, config.tokens_per_step
    seconds_before = trainer.history[-1]["seconds"] if trainer.history else 0.0
    for loss in trainer.steps():
        step = trainer.step
        if step % 10 == 0 or step == config.total_steps:
            seconds = time.monotonic() - started
            rate = (step - since) * tokens / seconds
            eta_min = (config.total_steps - step) * tokens / rate / 60
            line = f"step {step}/{config.total_steps}  loss {loss:.3f}  {rate:,.0f} tokens/s"
            console.print(f"{line}  eta {eta_min:.1f} min", highlight=False)
        if step % config.eval_every == 0 or step == config.total_steps:
            heldout_loss = trainer.heldout_loss()
            seconds = seconds_before + time.monotonic() - started
            trainer.history.append({"step": step, "train": loss, "heldout": heldout_loss, "seconds": seconds})
            console.print(f"[bold]step {step}: held-out loss {heldout_loss:.4f}[/bold]")
        if step % config.checkpoint_every == 0 or step == config.total_steps:
            trainer.save(checkpoint)
    checkpoint.with_name(f"{checkpoint.stem}-history.json").write_text(json.dumps(trainer.history, indent=1) + "\n")


def main(
    shape: Annotated[str, typer.Option(help="target: the Llama; hybrid: Qwen3.5's layout")] = "target",
    work_dir: Annotated[Path, typer.Option(help="corpus, token ids and checkpoint")] = Path(".run/training"),
    out: Annotated[Path | None, typer.Option(help="folder for the finished model [default: models/demo-SHAPE]")] = None,
    tokenizer_dir: Annotated[Path, typer.Option()] = Path(".run/training/tokenizer"),
    embedding_from: Annotated[
        Path | None, typer.Option(help="start from the principal components of this finished model's embeddings")
    ] = None,
    resume: Annotated[bool, typer.Option(help="continue from the checkpoint in work_dir")] = False,
    export_only: Annotated[bool, typer.Option(help="only export the checkpoint")] = False,
    total_steps: Annotated[int, typer.Option(help="optimizer steps; 0: the shape's")] = 0,
    decay_from: Annotated[int, typer.Option(help="step at which the rate starts to fall; 0: the shape's")] = 0,
    long_from: Annotated[int, typer.Option(help="step at which sequences grow to 1,024; 0: the shape's")] = 0,
    threads: Annotated[int, typer.Option()] = 2,
) -> None:
    """Train a target, continue training, or export the checkpoint.

    Examples:

      python -m models.make.train_lm

      python -m models.make.train_lm --resume --total-steps 1000 --decay-from 700 --long-from 850

      python -m models.make.train_lm --shape hybrid --embedding-from models/demo-target
    """
    if shape not in SHAPES:
        raise SettingError(f"--shape {shape}: must be one of {', '.join(SHAPES)}")
    torch.set_num_threads(threads)
    use_huge_pages()
    model_config, config = SHAPES[shape]
    given = {"total_steps": total_steps, "decay_from": decay_from, "long_from": long_from}
    config = replace(config, **{name: steps for name, steps in given.items() if steps})
    trainer = Trainer(config, model_config, work_dir)
    checkpoint = work_dir / f"{shape}.pt"
    if embedding_from is not None:
        init_from_target(trainer.model, AutoModelForCausalLM.from_pretrained(embedding_from, dtype=torch.float32))
    if resume or export_only:
        trainer.load(checkpoint)
    if not export_only:
        run_training(trainer, checkpoint, Console(width=110))
    export_model(trainer.model, out or Path(f"models/demo-{shape}"), tokenizer_dir)


if __name__ == "__main__":
    typer.run(main)
