"""Samples the demo heads' training and evaluation text: the target's continuations of training and held-out prompts.

Training rows are those of `models.make.sampling_data` with another seed, so both can be combined. Held-out rows go to
JSONL in the format of `prepare-data`, one file greedy and one at temperature 1. For other targets, use `outrider train
prepare-data`, which requests them from a server.
Run: `python -m models.make.head_samples --help`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel

from models.make.lm_data import BlockSampler, load_token_ids
from models.make.sampling_data import continue_rows, prompt_rows, sample_continuations

HELD_OUT_FILES = {0.0: "heldout-greedy.jsonl", 1.0: "heldout-temperature-1.jsonl"}
PROMPT_LEN, NUM_NEW_TOKENS = 64, 192
ROW_LEN = 256


def write_held_out(model: PreTrainedModel, work_dir: Path, out_dir: Path, num_prompts: int) -> None:
    """Continues held-out prompts of 64 tokens by 192, at temperatures 0 and 1, into one JSONL file each."""
    prompts = prompt_rows(load_token_ids(work_dir / "heldout.bin"), PROMPT_LEN, num_prompts, np.random.default_rng(9))
    for temperature, name in HELD_OUT_FILES.items():
        generator = torch.Generator(model.device).manual_seed(5)
        rows = continue_rows(model, prompts, torch.full((num_prompts,), temperature), NUM_NEW_TOKENS, generator)
        lines = [
            json.dumps(
                {"prompt_token_ids": row[:PROMPT_LEN], "token_ids": row[PROMPT_LEN:], "temperature": temperature}
            )
            for row in rows.tolist()
        ]
        (out_dir / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def write_corpus_rows(work_dir: Path, out_dir: Path, num_rows: int) -> None:
    """Writes plain corpus text, `num_rows` rows of 256: prompts are corpus text, and heads read them too."""
    sampler = BlockSampler(load_token_ids(work_dir / "train.bin"), ROW_LEN - 1, seed=13)
    rows = sampler.batch(0, min(num_rows, sampler.num_blocks))
    np.save(out_dir / "corpus.npy", rows.numpy().astype(np.uint16))


def main(
    target_dir: Annotated[Path, typer.Option(help="the finished target")] = Path("models/demo-target"),
    work_dir: Annotated[Path, typer.Option(help="folder of the corpus")] = Path(".run/training"),
    out_dir: Annotated[Path, typer.Option(help="folder for the samples")] = Path(".run/training/heads"),
    num_batches: Annotated[int, typer.Option(help="batches of rows of 256 tokens")] = 48,
    rows_per_batch: Annotated[int, typer.Option(help="rows per batch; 1024 fit a GPU")] = 96,
    max_seconds: Annotated[float, typer.Option(help="stop sampling after this long")] = 600.0,
    num_prompts: Annotated[int, typer.Option(help="held-out prompts")] = 64,
    num_corpus_rows: Annotated[int, typer.Option(help="rows of 256 of corpus text")] = 768,
    threads: Annotated[int, typer.Option()] = 2,
    device: Annotated[str, typer.Option(help="device of the target: cpu or cuda")] = "cpu",
) -> None:
    """Sample the target.

    Example: python -m models.make.head_samples --num-batches 16
    """
    torch.set_num_threads(threads)
    console = Console(width=110)
    out_dir.mkdir(parents=True, exist_ok=True)
    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.bfloat16).eval().to(device)
    write_held_out(target, work_dir, out_dir, num_prompts)
    console.print(f"{2 * num_prompts} held-out rows written to {out_dir}")
    out = out_dir / "own.npy"
    token_ids = load_token_ids(work_dir / "train.bin")
    num_rows = sample_continuations(
        target, token_ids, out, num_batches, max_seconds, console.print, rows_per_batch=rows_per_batch, seed=12
    )
    console.print(f"{num_rows} rows written to {out}")
    write_corpus_rows(work_dir, out_dir, num_corpus_rows)


if __name__ == "__main__":
    typer.run(main)
