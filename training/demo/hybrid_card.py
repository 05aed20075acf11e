"""Writes the hybrid's model card from measured figures.

Reads `hybrid-evaluation.json`, the runs' settings and histories, and the durations of the steps.
Run: `python -m outrider.training.demo.hybrid_card --help`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from outrider.training.demo.model_cards import read_made

CARD = """# demo-hybrid

A hybrid of {parameters:.1f} M parameters in Qwen3.5's layout (width 160, three layers with a gated delta net, one \
with attention, vocabulary 4,096, tied embeddings) with an MTP layer of {mtp_parameters:.2f} M more. It exists so \
that recurrent layers, and drafting with a target's own MTP layer, can be tried and tested from a clone. It is a \
smaller toy than `demo-target`: its text looks like Python from afar.

## Training
`training.demo.train_lm --shape hybrid`: {train_tokens:.2f} M tokens in {steps} steps of 2,048 on CPU (bf16 \
autocast, Muon and AdamW, sequences of 256, the last part 1,024), {minutes:.0f} minutes. The embeddings start from \
the principal components of `demo-target`'s, as `demo-draft`'s do; all else from random numbers. Held-out loss \
**{loss:.3f}** nats per token (32 sequences of 256).

The MTP layer: `outrider train train --method mtp`, {mtp_steps} steps of {mtp_batch} windows of up to {mtp_seq_len} \
tokens with the model frozen, {ttt_steps} steps of training-time test, {mtp_minutes:.0f} minutes. {own_percent:.0f} \
% of the windows are text that the hybrid wrote itself, the rest is corpus text.

## Evaluation
Tokens per round, the target's own included, along the hybrid's greedy continuations of {prompts} held-out prompts \
(192 tokens each): all tokens by all rounds, rounds without a draft among them.

| drafted per round | `mtp` | the same layer untrained | `ngram` |
|---|---|---|---|
{rounds}

By draft position of the MTP layer, given that the tokens before were right ({positions:,} positions at the first), \
weights as shipped, computed in float32:

| draft position | temperature 0: argmaxes agree | temperature 1: 1 - total variation |
|---|---|---|
{positions_rows}

Greedy text of so small a model falls into loops, which n-grams foresee too.

## Format
HF `Qwen3_5ForCausalLM`, bf16 safetensors: `model-target.safetensors`, and the MTP layer in `model-mtp.safetensors` \
under its published names. Tokenizer, stop ids, data, licences and limits are those of `demo-target`. Remake it with \
`make models`; see `docs/models.md`.
"""


def card_values(work_dir: Path, models_dir: Path) -> dict[str, Any]:
    """All values of the template. Raises CorpusError when a step has not been run."""
    figures, folder = read_made(models_dir / "hybrid-evaluation.json"), work_dir / "hybrid"
    history, run = read_made(work_dir / "hybrid-history.json"), read_made(folder / "mtp" / "run.json")
    own, corpus = (len(np.load(folder / name, mmap_mode="r")) for name in ("own.npy", "corpus.npy"))
    per_round = figures["tokens_per_round"]
    columns = ("mtp", "mtp, untrained", "ngram")
    rounds = [
        f"| {count} | " + " | ".join(f"{per_round[name][count]:.2f}" for name in columns) + " |"
        for count in per_round["mtp"]
    ]
    by_position = zip(figures["temperature_0"]["agreement"], figures["temperature_1"]["overlap"], strict=True)
    optimization = run["optimization"]
    return {
        "parameters": figures["parameters"]["target"] / 1e6,
        "mtp_parameters": figures["parameters"]["mtp"] / 1e6,
        "steps": int(history[-1]["step"]),
        "train_tokens": history[-1]["step"] * 2048 / 1e6,
        "minutes": history[-1]["seconds"] / 60,
        "loss": history[-1]["heldout"],
        "mtp_steps": optimization["steps"],
        "mtp_batch": optimization["batch_size"] * optimization["accumulation"],
        "mtp_seq_len": run["seq_len"],
        "ttt_steps": run["head"]["ttt_steps"],
        "mtp_minutes": read_made(work_dir / "hybrid-mtp.done")["seconds"] / 60,
        "own_percent": 100 * own / (own + corpus),
        "prompts": figures["held_out_prompts"],
        "rounds": "\n".join(rounds),
        "positions": figures["temperature_0"]["positions"],
        "positions_rows": "\n".join(
            f"| {position} | {cold:.3f} | {warm:.3f} |" for position, (cold, warm) in enumerate(by_position, 1)
        ),
    }


def main(
    work_dir: Annotated[Path, typer.Option(help="runs and stamps")] = Path(".run/training"),
    models_dir: Annotated[Path, typer.Option(help="folder of demo-hybrid and hybrid-evaluation.json")] = Path("models"),
) -> None:
    """Write models/demo-hybrid/README.md.

    Example: python -m outrider.training.demo.hybrid_card
    """
    text = CARD.format(**card_values(work_dir, models_dir))
    (models_dir / "demo-hybrid" / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
