"""How well finished heads guess what their target says: per draft position, on the target's own held-out text.

Along greedy text the two argmaxes are compared (what greedy acceptance counts), along samples at temperature 1 the
overlap of the two laws (one minus total variation, what rejection sampling accepts). A position is judged given that
those before it were right. Weights are the shipped ones, computed with in float32. Not here: acceptance through the
services (evaluate_heads). Run: `python -m training.agreement --help`.
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

from drafter_service.checkpoints.eagle import load_eagle
from drafter_service.checkpoints.eagle3 import load_eagle3
from drafter_service.checkpoints.medusa import load_medusa
from drafter_service.checkpoints.mlp_speculator import load_mlp_speculator
from drafter_service.checkpoints.recognise import recognise
from drafter_service.checkpoints.target_weights import load_target_weights
from training.cli_errors import clear_errors
from training.frozen_target import FrozenTarget
from training.head_data import TokenWindows, load_windows, make_batch
from training.head_samples import HELD_OUT_FILES
from training.head_trainer import noise_generator
from training.heads.draft_model import DraftModelObjective
from training.heads.eagle import EagleObjective
from training.heads.eagle3 import Eagle3Objective
from training.heads.interface import DraftScores, Objective
from training.heads.medusa import MedusaObjective
from training.heads.mlp_speculator import MlpSpeculatorObjective
from training.heads.options import HeadOptions
from training.heads.ttt_attention import TTT_ATTENTION, register_ttt_attention
from training.tokenize_rows import RowEncoder

_ROWS_AT_ONCE = 8


def load_for_measuring(path: Path, target: FrozenTarget) -> Objective:
    """The head or draft model in a checkpoint folder with its objective, in float32 and eval mode.

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
    elif method == "eagle3":
        head = load_eagle3(path, weights, torch.float32, attn_implementation=TTT_ATTENTION)
        objective = Eagle3Objective(head, type(target.model).__name__)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, use_safetensors=True)
        objective = DraftModelObjective(model, target.path)
    return objective.eval()


@torch.no_grad()
def score(objective: Objective, target: FrozenTarget, windows: TokenWindows) -> DraftScores:
    """Sums over all counted tokens of `windows`."""
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
    """Figures per head and temperature, as plain data."""
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
    """Print the figures: a row per head, greedy agreement and overlap at temperature 1 per draft position."""
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
    samples_dir: Annotated[Path, typer.Option(help="of training.head_samples")] = Path(".run/training/heads"),
    out: Annotated[str, typer.Option(help="JSON file for the figures, below --models-dir")] = "heads-evaluation.json",
    threads: Annotated[int, typer.Option()] = 2,
) -> None:
    """Measure heads on held-out text.

    Example: python -m training.agreement --head demo-eagle3 --head demo-medusa
    """
    with clear_errors():
        torch.set_num_threads(threads)
        figures = measure([models_dir / name for name in head], models_dir / target, samples_dir)
        (models_dir / out).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        show(figures, Console(width=140))


if __name__ == "__main__":
    typer.run(main)
