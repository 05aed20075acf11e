"""Evaluates the pair on held-out text: loss, greedy agreement, and the gain of a draft of k tokens.

All figures are about the target's own continuations of held-out prompts. With r_i = min(1, q_i(x_i)/p_i(x_i)) along a
sample x of the target, E[r_1 ... r_i] is exactly the probability that rejection sampling accepts the first i draft
tokens (sum over x of prod min(p, q)); at temperature 0, that the first i argmaxes agree. Not a benchmark: nothing is
timed. Run: `python -m models.make.evaluate --help`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM

from models.make.lm_data import BlockSampler, load_token_ids
from models.make.sampling_data import continue_rows, prompt_rows

MAX_DRAFT_LEN = 8


@torch.no_grad()
def logits_of(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Returns logits float32[batch, length, vocab] over rows int64[batch, length]."""
    logits: torch.Tensor = model(input_ids=rows, use_cache=False).logits
    return logits.float()


def heldout_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Returns the mean cross-entropy in nats per token over rows int64[batch, length]."""
    total = 0.0
    for part in torch.split(rows, 4):
        logits = logits_of(model, part[:, :-1])
        total += float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())) * len(part)
    return total / len(rows)


def accepted_tokens(ratios: torch.Tensor, max_draft_len: int) -> list[float]:
    """Returns the mean number of accepted draft tokens for every draft length k = 1..max_draft_len.

    `ratios` float[rows, positions] are the acceptance chances r along target samples; windows of k positions start
    everywhere. The k-th value is the mean of r_1 + r_1 r_2 + ... + r_1...r_k.
    """
    windows = ratios.double().unfold(1, max_draft_len, 1)
    return [float(value) for value in windows.cumprod(dim=-1).cumsum(dim=-1).mean(dim=(0, 1))]


@torch.no_grad()
def acceptance(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    prompts: torch.Tensor,
    temperature: float,
    num_new_tokens: int,
    seed: int = 5,
) -> dict[str, Any]:
    """Measures acceptance along the target's continuations of `prompts` int64[rows, prompt] at temperature 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    temperatures = torch.full((len(prompts),), temperature)
    rows = continue_rows(target, prompts, temperatures, num_new_tokens, generator)
    ratios, overlaps, entropies, agreements = [], [], [], []
    for part in torch.split(rows, 8):
        begin = prompts.shape[1] - 1
        target_logits = logits_of(target, part)[:, begin:-1]
        draft_logits = logits_of(draft, part)[:, begin:-1]
        target_probs, draft_probs = target_logits.softmax(-1), draft_logits.softmax(-1)
        agree = (target_logits.argmax(-1) == draft_logits.argmax(-1)).float()
        picked = part[:, begin + 1 :, None]
        ratio = (draft_probs.gather(-1, picked) / target_probs.gather(-1, picked)).clamp(max=1.0).squeeze(-1)
        ratios.append(agree if temperature == 0 else ratio)
        agreements.append(agree)
        overlaps.append(torch.minimum(target_probs, draft_probs).sum(-1))
        entropies.append(torch.special.entr(target_probs).sum(-1))
    per_token = torch.cat(agreements if temperature == 0 else overlaps)
    return {
        "per_token": float(per_token.mean()),
        "argmax_agreement": float(torch.cat(agreements).mean()),
        "one_minus_total_variation": float(torch.cat(overlaps).mean()),
        "target_entropy_nats": float(torch.cat(entropies).mean()),
        "accepted_tokens_by_draft_len": accepted_tokens(torch.cat(ratios), MAX_DRAFT_LEN),
        "positions": int(per_token.numel()),
    }


def evaluate(target_dir: Path, draft_dir: Path, work_dir: Path, num_prompts: int, seq_len: int) -> dict[str, Any]:
    """Returns all figures, as plain data. Weights are the shipped bf16 ones, computed in fp32."""
    target = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    draft = LlamaForCausalLM.from_pretrained(draft_dir, dtype=torch.float32).eval()
    token_ids = load_token_ids(work_dir / "heldout.bin")
    sampler = BlockSampler(token_ids, seq_len, seed=0)
    rows = sampler.batch(0, sampler.num_blocks)
    prompts = prompt_rows(token_ids, 64, num_prompts, np.random.default_rng(9))
    losses = {"target": heldout_loss(target, rows), "draft": heldout_loss(draft, rows)}
    return {
        "heldout_tokens": int(rows[:, 1:].numel()),
        "heldout_loss": losses,
        "heldout_perplexity": {name: math.exp(loss) for name, loss in losses.items()},
        "parameters": {"target": target.num_parameters(), "draft": draft.num_parameters()},
        "temperature_0": acceptance(target, draft, prompts, 0.0, 192),
        "temperature_1": acceptance(target, draft, prompts, 1.0, 192),
    }


def show(figures: dict[str, Any], console: Console) -> None:
    """Prints the figures as two tables."""
    losses = Table("model", "parameters", "held-out loss (nats/token)", "perplexity")
    for name in ("target", "draft"):
        loss, perplexity = figures["heldout_loss"][name], figures["heldout_perplexity"][name]
        losses.add_row(name, f"{figures['parameters'][name]:,}", f"{loss:.3f}", f"{perplexity:.1f}")
    console.print(losses)
    columns = ["temperature", "per token", *(f"k={k}" for k in range(1, MAX_DRAFT_LEN + 1))]
    accepted = Table(*columns, title="accepted draft tokens per step of the target (it adds one of its own)")
    for temperature in (0, 1):
        row = figures[f"temperature_{temperature}"]
        values = [f"{value:.2f}" for value in row["accepted_tokens_by_draft_len"]]
        accepted.add_row(str(temperature), f"{row['per_token']:.3f}", *values)
    console.print(accepted)


def main(
    target_dir: Annotated[Path, typer.Option()] = Path("models/demo-target"),
    draft_dir: Annotated[Path, typer.Option()] = Path("models/demo-draft"),
    work_dir: Annotated[Path, typer.Option(help="folder of heldout.bin")] = Path(".run/training"),
    out: Annotated[Path, typer.Option(help="JSON file for the figures")] = Path("models/evaluation.json"),
    num_prompts: Annotated[int, typer.Option(help="held-out prompts of 64 tokens, continued by 192")] = 64,
    seq_len: Annotated[int, typer.Option(help="sequence length for the held-out loss")] = 512,
    threads: Annotated[int, typer.Option()] = 2,
) -> None:
    """Evaluate the pair on held-out text.

    Example: python -m models.make.evaluate --num-prompts 128 --out /tmp/figures.json
    """
    torch.set_num_threads(threads)
    figures = evaluate(target_dir, draft_dir, work_dir, num_prompts, seq_len)
    out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    show(figures, Console(width=110))


if __name__ == "__main__":
    typer.run(main)
