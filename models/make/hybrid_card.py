"""Writes the model cards of the hybrid and of its EAGLE-3 head from measured figures.

Reads `hybrid-evaluation.json`, the runs' settings and histories, and the durations of the steps.
Run: `python -m models.make.hybrid_card --help`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from models.make.make_hybrid import EAGLE3_NAME, EAGLE3_OPTIONS
from models.make.model_cards import read_made

CARD = """# demo-hybrid

A hybrid of {parameters:.1f} M parameters in Qwen3.5's layout (width 160, three layers with a gated delta net, one \
with attention, vocabulary 4,096, tied embeddings) with an MTP layer of {mtp_parameters:.2f} M more. It exists so \
that recurrent layers, and drafting with a target's own MTP layer, can be tried and tested from a clone. It is a \
smaller toy than `demo-target`: its text looks like Python from afar. `demo-hybrid-eagle3` is an EAGLE-3 head for it.

## Training
`models.make.train_lm --shape hybrid`: {train_tokens:.2f} M tokens in {steps} steps of 2,048 on CPU (bf16 \
autocast, Muon and AdamW, sequences of 256, the last part 1,024), {minutes:.0f} minutes. The embeddings start from \
the principal components of `demo-target`'s, as `demo-draft`'s do; all else from random numbers. Held-out loss \
**{loss:.3f}** nats per token (32 sequences of 256).

The MTP layer: `outrider train train --method mtp`, {mtp_steps} steps of {mtp_batch} windows of up to {mtp_seq_len} \
tokens with the model frozen, {ttt_steps} steps of training-time test, {mtp_minutes:.0f} minutes. {own_percent:.0f} \
% of the windows are text that the hybrid wrote itself, the rest is corpus text.

## Evaluation
Tokens per round, the target's own included, along the hybrid's greedy continuations of {prompts} held-out prompts \
(192 tokens each): all tokens by all rounds, rounds without a draft among them.

{rounds}
{served}
By draft position of the MTP layer, given that the tokens before were right ({positions:,} positions at the first), \
weights as shipped, computed in float32:

{by_position}

Greedy text of so small a model falls into loops, which n-grams foresee too.

## Format
HF `Qwen3_5ForCausalLM`, bf16 safetensors: `model-target.safetensors`, and the MTP layer in `model-mtp.safetensors` \
under its published names. Tokenizer, stop ids, data, licences and limits are those of `demo-target`. Remake it with \
`make models`; see `docs/models.md`.
"""

HEAD_CARD = """# demo-hybrid-eagle3

An EAGLE-3 head for `demo-hybrid`, a target with recurrent layers; {megabytes:.1f} MB in bf16. Only good for drafting \
for that one model, whose MTP layer it is compared with.

## Training
`outrider train train --method eagle3`: {steps} steps of {batch} windows of up to {seq_len} tokens on CPU, \
{minutes:.0f} minutes, of text such as the MTP layer was trained on. It reads the target's hidden states after its \
three recurrent layers. Its own options: `{options}`.

## Evaluation
Tokens per round, the target's own included, along the hybrid's greedy continuations of {prompts} held-out prompts \
(192 tokens each): all tokens by all rounds, rounds without a draft among them.

{rounds}
{served}
By draft position of the head, given that the tokens before were right ({positions:,} positions at the first), \
weights as shipped, computed in float32:

{by_position}

## Format
The speculators format, which vLLM recognises; the target's embedding is not in it. Data, licences and limits are \
those of `demo-target`. Remake it with `make models`; see `docs/models.md`.
"""

SERVED = """
Tokens per second of one stream through the whole stack at temperature 0 (`python -m benchmarks.hybrid.methods`), off \
{off:.0f}:

{speeds}
"""

# Columns of the table: name in the figures -> heading.
_DRAFTERS = {"mtp": "`mtp`", "mtp, untrained": "the same layer untrained", "eagle3": "`eagle3`", "ngram": "`ngram`"}


def card_texts(work_dir: Path, models_dir: Path) -> dict[str, str]:
    """Returns the card of each model folder. Raises CorpusError when a step has not been run."""
    figures, folder = read_made(models_dir / "hybrid-evaluation.json"), work_dir / "hybrid"
    head = models_dir / EAGLE3_NAME / "model.safetensors"
    return {
        "demo-hybrid": CARD.format(**_model_values(work_dir, folder, figures), **_measured(figures, "mtp")),
        EAGLE3_NAME: HEAD_CARD.format(
            **_head_values(work_dir, folder),
            **_measured(figures, "eagle3"),
            megabytes=head.stat().st_size / 1e6,
        ),
    }


def _model_values(work_dir: Path, folder: Path, figures: dict[str, Any]) -> dict[str, Any]:
    history, run = read_made(work_dir / "hybrid-history.json"), read_made(folder / "mtp" / "run.json")
    own, corpus = (len(np.load(folder / name, mmap_mode="r")) for name in ("own.npy", "corpus.npy"))
    return {
        "parameters": figures["parameters"]["target"] / 1e6,
        "mtp_parameters": figures["parameters"]["mtp"] / 1e6,
        "steps": int(history[-1]["step"]),
        "train_tokens": history[-1]["step"] * 2048 / 1e6,
        "minutes": history[-1]["seconds"] / 60,
        "loss": history[-1]["heldout"],
        "mtp_steps": run["optimization"]["steps"],
        "mtp_batch": _windows_per_step(run),
        "mtp_seq_len": run["seq_len"],
        "ttt_steps": run["head"]["ttt_steps"],
        "mtp_minutes": read_made(work_dir / "hybrid-mtp.done")["seconds"] / 60,
        "own_percent": 100 * own / (own + corpus),
    }


def _head_values(work_dir: Path, folder: Path) -> dict[str, Any]:
    run = read_made(folder / "eagle3" / "run.json")
    return {
        "steps": run["optimization"]["steps"],
        "batch": _windows_per_step(run),
        "seq_len": run["seq_len"],
        "minutes": read_made(work_dir / "hybrid-eagle3.done")["seconds"] / 60,
        "options": " ".join(EAGLE3_OPTIONS),
    }


def _windows_per_step(run: dict[str, Any]) -> int:
    count: int = run["optimization"]["batch_size"] * run["optimization"]["accumulation"]
    return count


def _measured(figures: dict[str, Any], method: str) -> dict[str, Any]:
    """Returns the measured figures of all drafters, and of this one by draft position."""
    per_round, cold, warm = figures["tokens_per_round"], *(figures[method][f"temperature_{t}"] for t in (0, 1))
    rounds = [["drafted per round", *_DRAFTERS.values()]]
    rounds += [[count, *(f"{per_round[name][count]:.2f}" for name in _DRAFTERS)] for count in per_round["mtp"]]
    by_position = [["draft position", "temperature 0: argmaxes agree", "temperature 1: 1 - total variation"]]
    by_position += [
        [str(position), f"{agreement:.3f}", f"{overlap:.3f}"]
        for position, (agreement, overlap) in enumerate(zip(cold["agreement"], warm["overlap"], strict=True), 1)
    ]
    return {
        "prompts": figures["held_out_prompts"],
        "positions": cold["positions"],
        "rounds": _table(rounds),
        "served": _served(figures),
        "by_position": _table(by_position),
    }


def _served(figures: dict[str, Any]) -> str:
    """Returns the tokens per second; empty if they have not been measured since the other figures."""
    if "served" not in figures:
        return ""
    measured, methods = figures["served"]["temperature_0"], ("mtp", "eagle3", "ngram")
    speeds = [["drafted per round", *(f"`{method}`" for method in methods)]]
    speeds += [
        [count, *(f"{measured[f'{method} {count}']['tokens_per_s']:.0f}" for method in methods)]
        for count in figures["tokens_per_round"]["mtp"]
    ]
    return SERVED.format(off=measured["off"]["tokens_per_s"], speeds=_table(speeds))


def _table(rows: list[list[str]]) -> str:
    """Renders rows as a Markdown table; the first row is the heading."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main(
    work_dir: Annotated[Path, typer.Option(help="runs and stamps")] = Path(".run/training"),
    models_dir: Annotated[Path, typer.Option(help="folder of demo-hybrid and hybrid-evaluation.json")] = Path("models"),
) -> None:
    """Write the README.md of models/demo-hybrid and models/demo-hybrid-eagle3.

    Example: python -m models.make.hybrid_card
    """
    for name, text in card_texts(work_dir, models_dir).items():
        (models_dir / name / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
