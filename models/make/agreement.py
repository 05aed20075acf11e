"""Measures how well finished heads predict their target: per draft position, on the target's own held-out text.

On greedy text it compares argmaxes (greedy acceptance); on samples at temperature 1, the overlap of the distributions
(one minus total variation, acceptance under rejection sampling). A position's figure is conditional on those before it
being right. Shipped weights, computed in float32. Not here: acceptance through the services (evaluate_heads.py).
Run: `python -m models.make.agreement --help`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from models.make.head_samples import HELD_OUT_FILES
from outrider.drafting.checkpoints.block import load_block
from outrider.drafting.checkpoints.eagle import load_eagle
from outrider.drafting.checkpoints.eagle3 import load_eagle3
from outrider.drafting.checkpoints.medusa import load_medusa
from outrider.drafting.checkpoints.mlp_speculator import load_mlp_speculator
from outrider.drafting.checkpoints.recognise import recognise
from outrider.drafting.checkpoints.target_weights import load_target_weights
from outrider.training.commands.errors import clear_errors
from outrider.training.data.head_data import TokenWindows, load_windows, make_batch
from outrider.training.data.tokenize_rows import RowEncoder
from outrider.training.frozen_target import FrozenTarget
from outrider.training.head_trainer import noise_generator
from outrider.training.heads.block import BlockObjective
from outrider.training.heads.draft_model import DraftModelObjective
from outrider.training.heads.eagle import EagleObjective
from outrider.training.heads.eagle3 import Eagle3Objective
from outrider.training.heads.interface import DraftScores, Objective
from outrider.training.heads.medusa import MedusaObjective
from outrider.training.heads.mlp_speculator import MlpSpeculatorObjective
from outrider.training.heads.options import HeadOptions
from outrider.training.heads.ttt_attention import TTT_ATTENTION, register_ttt_attention

_ROWS_AT_ONCE = 8


def load_for_measuring(path: Path, target: FrozenTarget) -> Objective:
    """Loads the head or draft model of a checkpoint folder with its objective, in float32 and eval mode.

    Raises CheckpointRefused.
    """
    method, weights = recognise(path), load_target_weights(target.path, torch.float32)
    register_ttt_attention()
    if method == "medusa":
        objective: Objective = MedusaObjective(load_medusa(path, weights, torch.float32), target.num_layers)
    elif method == "mlp_speculator":
        objective = MlpSpeculatorObjective(load_mlp_speculator(path, weights, torch.float32), target.num_layers)
    elif method == "eagle":
        objective = EagleObjective(
            load_eagle(path, weights, torch.float32, attn_implementation=TTT_ATTENTION), HeadOptions()
        )
    elif method in ("dspark", "dflash"):
        block = load_block(path, weights, torch.float32, attn_implementation="sdpa")
        objective = BlockObjective(block, type(target.model).__name__)
    elif method == "eagle3":
        head = load_eagle3(path, weights, torch.float32, attn_implementation=TTT_ATTENTION)
        objective = Eagle3Objective(head, type(target.model).__name__)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, use_safetensors=True)
        objective = DraftModelObjective(model, target.path)
    return objective.eval()


@torch.no_grad()
def score(objective: Objective, target: FrozenTarget, windows: TokenWindows) -> DraftScores:
    """Returns sums over all counted tokens of `windows`."""
    total: DraftScores | None = None
    for start in range(0, len(windows), _ROWS_AT_ONCE):
        batch = make_batch(windows, torch.arange(start, min(start + _ROWS_AT_ONCE, len(windows))).numpy())
        view = target.view(batch.token_ids, objective.feature_layers)
        scores = objective(batch, view, noise_generator(0, 0, 0))[1]
        total = scores if total is None else total + scores
    if total is None:
        raise ValueError("no windows")
    return total


def measure(heads: list[Path], target_dir: Path, samples_dir: Path) -> dict[str, Any]:
    """Returns the figures per head and temperature, as plain data."""
    target = FrozenTarget(target_dir, torch.float32)
    encode = RowEncoder(target_dir)
    held_out = {
        temperature: load_windows([samples_dir / name], encode, target.vocab_size, seq_len=2048)
        for temperature, name in HELD_OUT_FILES.items()
    }
    figures: dict[str, Any] = {}
    for path in heads:
        objective = load_for_measuring(path, target)
        row: dict[str, Any] = {
            "method": recognise(path),
            "bytes": sum(file.stat().st_size for file in path.glob("*.safetensors")),
        }
        for temperature, windows in held_out.items():
            scores = score(objective, target, windows)
            row[f"temperature_{temperature:g}"] = scores.means() | {"positions": int(scores.num_positions[0])}
        figures[path.name] = row
    return figures


def show(figures: dict[str, Any], console: Console) -> None:
    """Prints the figures: one row per head; greedy agreement and overlap at temperature 1 per draft position."""
    num_depths = max(len(row["temperature_0"]["agreement"]) for row in figures.values())
    columns = [f"{kind} {depth + 1}" for kind in ("top-1", "overlap") for depth in range(num_depths)]
    table = Table("head", "MB", *columns, title="by draft position: greedy agreement; overlap at temperature 1")
    for name, row in figures.items():
        cells: list[str] = []
        for values in (row["temperature_0"]["agreement"], row["temperature_1"]["overlap"]):
            cells += [f"{value:.2f}" for value in values] + [""] * (num_depths - len(values))
        table.add_row(name, f"{row['bytes'] / 1e6:.1f}", *cells)
    console.print(table)


def main(
    head: Annotated[list[str], typer.Option(help="Folder of a head, below --models-dir; may be repeated.")],
    models_dir: Annotated[Path, typer.Option(help="where the heads and demo-target are")] = Path("models"),
    target: Annotated[str, typer.Option(help="folder of the target, below --models-dir")] = "demo-target",
    samples_dir: Annotated[Path, typer.Option(help="of models.make.head_samples")] = Path(".run/training/heads"),
    out: Annotated[str, typer.Option(help="JSON file for the figures, below --models-dir")] = "heads-evaluation.json",
    threads: Annotated[int, typer.Option()] = 2,
) -> None:
    """Measure heads on held-out text.

    Example: python -m models.make.agreement --head demo-eagle3 --head demo-medusa
    """
    with clear_errors():
        torch.set_num_threads(threads)
        figures = measure([models_dir / name for name in head], models_dir / target, samples_dir)
        (models_dir / out).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        show(figures, Console(width=140))


if __name__ == "__main__":
    typer.run(main)
