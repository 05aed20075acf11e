"""Trains the draft model to predict the target: distillation on the target's own continuations.

Step a samples continuations of training prompts from the target (`models.make.sampling_data`). Step b minimizes the
KL divergence from the target's distribution to the draft's, plus a little cross-entropy, on those rows and on corpus
text, with the frozen target in the loop. Acceptance under rejection sampling is 1 - total variation, which the KL
bounds (Pinsker); greedy acceptance is argmax agreement. Run: `python -m models.make.distill --help`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from models.make.family import export_model, llama_config
from models.make.lm_data import BlockSampler, load_token_ids
from models.make.sampling_data import sample_continuations
from outrider.shared.machine.memory import use_huge_pages
from outrider.training.heads.draft_model import CROSS_ENTROPY_WEIGHT, init_from_target
from outrider.training.optim import HybridOptimizer, Schedule


@dataclass(frozen=True)
class DistillConfig:
    """The settings of a distillation; counts are in optimizer steps.

    Of `rows_per_step` rows, `own_rows` are the target's own text, the rest corpus.
    """

    total_steps: int = 2300
    warmup_steps: int = 30
    decay_from: int = 1000
    row_len: int = 256
    rows_per_step: int = 16
    own_rows: int = 12
    cross_entropy_weight: float = CROSS_ENTROPY_WEIGHT
    muon_lr: float = 6e-3
    adamw_lr: float = 4e-3
    weight_decay: float = 0.02
    seed: int = 3


def distill_loss(
    draft: LlamaForCausalLM, target: LlamaForCausalLM, rows: torch.Tensor, cross_entropy_weight: float
) -> tuple[torch.Tensor, float]:
    """Returns (loss, share of positions where both argmaxes agree) over rows int64[batch, length].

    The loss is in nats per token.
    """
    inputs, labels = rows[:, :-1], rows[:, 1:].flatten()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            target_logits = target(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
        draft_logits = draft(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
    draft_log_probs = F.log_softmax(draft_logits.float(), dim=-1)
    target_log_probs = F.log_softmax(target_logits.float(), dim=-1)
    loss = F.kl_div(draft_log_probs, target_log_probs, reduction="batchmean", log_target=True)
    loss = loss + cross_entropy_weight * F.nll_loss(draft_log_probs, labels)
    agreement = (draft_logits.argmax(dim=-1) == target_logits.argmax(dim=-1)).float().mean()
    return loss, float(agreement)


def batches(config: DistillConfig, corpus: BlockSampler, own: np.ndarray | None) -> Iterator[torch.Tensor]:
    """Yields int64[rows_per_step, row_len] per step: own rows reshuffled every epoch, then corpus rows."""
    rng = np.random.default_rng(config.seed)
    num_own = config.own_rows if own is not None else 0
    order: list[int] = []
    for step in range(config.total_steps):
        rows = [corpus.batch(step, config.rows_per_step - num_own)] if num_own < config.rows_per_step else []
        if own is not None and num_own:
            while len(order) < num_own:
                order += rng.permutation(len(own)).tolist()
            picked, order = order[:num_own], order[num_own:]
            rows.append(torch.from_numpy(own[picked].astype(np.int64)))
        yield torch.cat(rows)


def distill(
    draft: LlamaForCausalLM,
    target: LlamaForCausalLM,
    config: DistillConfig,
    corpus: BlockSampler,
    own: np.ndarray | None,
) -> Iterator[tuple[int, float, float]]:
    """Trains `draft` in place; yields (step, loss, argmax agreement on the training rows) after every step."""
    optimizer = HybridOptimizer(draft, config.muon_lr, config.adamw_lr, config.weight_decay)
    schedule = Schedule(config.warmup_steps, config.decay_from, config.total_steps)
    for step, rows in enumerate(batches(config, corpus, own)):
        loss, agreement = distill_loss(draft, target, rows, config.cross_entropy_weight)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step(schedule.factor(step))
        yield step + 1, loss.item(), agreement


def draft_config() -> LlamaConfig:
    """Returns the shape of the demo draft: 1.7 M parameters, about a fifth of the target's."""
    return llama_config(hidden_size=192, num_layers=2, num_heads=3, intermediate_size=512)


def new_draft(seed: int) -> LlamaForCausalLM:
    """Builds a draft with random weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM._from_config(draft_config(), attn_implementation="sdpa")


def sample_step(target_dir: Path, work_dir: Path, num_batches: int, max_seconds: float, console: Console) -> None:
    """Runs step a: writes `continuations.npy` to the work folder."""
    target = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.bfloat16).eval()
    token_ids = load_token_ids(work_dir / "train.bin")
    out = work_dir / "continuations.npy"
    num_rows = sample_continuations(target, token_ids, out, num_batches, max_seconds, console.print)
    console.print(f"{num_rows} rows written to {out}")


def train_step(
    target_dir: Path, out: Path, work_dir: Path, config: DistillConfig, console: Console, init: Path | None = None
) -> None:
    """Runs step b: trains a draft on `continuations.npy` and the corpus, into `out`.

    init: a draft to continue; None: a new one.
    """
    target = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.bfloat16).eval()
    if init is None:
        draft = new_draft(config.seed)
        init_from_target(draft, target)
    else:
        draft = LlamaForCausalLM.from_pretrained(init, dtype=torch.float32, attn_implementation="sdpa").train()
    own_path = work_dir / "continuations.npy"
    own = np.load(own_path, mmap_mode="r") if own_path.exists() else None
    if own is None:
        console.print("[yellow]no continuations.npy: training on corpus text alone[/yellow]")
    corpus = BlockSampler(load_token_ids(work_dir / "train.bin"), config.row_len - 1, config.seed)
    started = time.monotonic()
    for step, loss, agreement in distill(draft, target, config, corpus, own):
        if step % 10 == 0 or step == config.total_steps:
            rate = step * config.rows_per_step * config.row_len / (time.monotonic() - started)
            eta_min = (config.total_steps - step) * config.rows_per_step * config.row_len / rate / 60
            line = f"step {step}/{config.total_steps}  loss {loss:.3f}  agreement {agreement:.3f}"
            console.print(f"{line}  {rate:,.0f} tokens/s  eta {eta_min:.1f} min", highlight=False)
        if step % 100 == 0:
            export_model(draft, out, target_dir)
    export_model(draft, out, target_dir)


def main(
    target_dir: Annotated[Path, typer.Option(help="the finished target")] = Path("models/demo-target"),
    out: Annotated[Path, typer.Option(help="folder for the draft")] = Path("models/demo-draft"),
    work_dir: Annotated[Path, typer.Option(help="corpus and sampled continuations")] = Path(".run/training"),
    sample: Annotated[bool, typer.Option(help="step a: sample the target's continuations")] = True,
    train: Annotated[bool, typer.Option(help="step b: train the draft")] = True,
    num_batches: Annotated[int, typer.Option(help="batches of 96 continuations")] = 64,
    max_sample_seconds: Annotated[float, typer.Option(help="stop sampling after this long")] = 480.0,
    total_steps: Annotated[int, typer.Option(help="optimizer steps of 4,096 tokens")] = DistillConfig.total_steps,
    decay_from: Annotated[int, typer.Option(help="step at which the rate starts to fall")] = DistillConfig.decay_from,
    init: Annotated[Path | None, typer.Option(help="continue training this draft")] = None,
    threads: Annotated[int, typer.Option()] = 2,
) -> None:
    """Distil the draft from the target.

    Examples:

      python -m models.make.distill

      python -m models.make.distill --no-sample --total-steps 500 --decay-from 250

      python -m models.make.distill --init models/demo-draft --out .run/training/longer
    """
    torch.set_num_threads(threads)
    use_huge_pages()
    console = Console(width=110)
    if sample:
        sample_step(target_dir, work_dir, num_batches, max_sample_seconds, console)
    if train:
        config = replace(DistillConfig(), total_steps=total_steps, decay_from=decay_from)
        train_step(target_dir, out, work_dir, config, console, init)


if __name__ == "__main__":
    typer.run(main)
