"""Measures what packed arithmetic costs in quality: `python -m benchmarks.packed.perplexity MODEL TEXT...`.

Perplexity of texts in windows, and how far each row's law is from that of the same weights dequantised in float32 (mean
Kullback-Leibler divergence, and the difference of logits relative to their size). Rows go to
benchmarks/results/packed_perplexity.jsonl.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.packed.__main__ import BLOCK_SIZE
from benchmarks.records import save_rows
from benchmarks.screen import console, table
from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.model.gguf.folder import model_folder
from outrider.engine.model.load import load_model
from outrider.engine.run.runner import ModelRunner
from outrider.gateway.request.tokenizer import Tokenizer

# Name -> load_model's arguments; the first is what the others are compared with.
SIDES: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bf16": {"packed_arithmetic": "bf16"},
    "int8": {"packed_arithmetic": "int8"},
}
_CHUNK_ROWS = 128


@dataclass
class _Sums:
    """Sums over positions."""

    loss: float = 0.0
    divergence: float = 0.0
    difference: float = 0.0
    size: float = 0.0


@torch.inference_mode()
def main(
    model: Annotated[str, typer.Argument(help="A quantised checkpoint: folder or .gguf file.")],
    texts: Annotated[list[Path], typer.Argument(help="Text files.")],
    window: Annotated[int, typer.Option(help="Tokens of a window, each read from its beginning.")] = 512,
    windows: Annotated[int, typer.Option(help="Windows read, over all texts.")] = 16,
    save: Annotated[bool, typer.Option(help="Append rows to benchmarks/results/packed_perplexity.jsonl.")] = True,
) -> None:
    """Example: python -m benchmarks.packed.perplexity SmolLM2-135M-Instruct.Q4_1.gguf docs/*.md --no-save"""
    path = model_folder(model)
    token_ids = Tokenizer.load(path).encode("\n".join(text.read_text() for text in texts))
    pieces = [token_ids[start : start + window] for start in range(0, len(token_ids) - window, window)][:windows]
    blocks = list(range(-(-window // BLOCK_SIZE)))
    runners = {}
    for name, options in SIDES.items():
        loaded = load_model(path, **options)  # type: ignore[arg-type]
        runners[name] = ModelRunner(loaded, loaded.make_cache(len(blocks), BLOCK_SIZE))
    sums = {name: _Sums() for name in SIDES}
    for piece in pieces:
        for start in range(0, len(piece) - 1, _CHUNK_ROWS):
            rows = piece[start : min(start + _CHUNK_ROWS, len(piece) - 1)]
            batch = build_batch([SessionRows(rows, start, blocks, len(rows))], BLOCK_SIZE)
            following = torch.tensor(piece[start + 1 : start + 1 + len(rows)])
            logits = {name: runner.forward(batch).logits.float() for name, runner in runners.items()}
            _add(sums, logits, following)
    num_positions = len(pieces) * (window - 1)
    found = [_row(Path(model).name, name, sums[name], num_positions) for name in SIDES]
    console.print(_table(found))
    if save:
        print(f"rows appended to {save_rows('packed_perplexity', found)}")


def _add(sums: dict[str, _Sums], logits: dict[str, torch.Tensor], following: torch.Tensor) -> None:
    plain = next(iter(logits.values()))
    law = plain.log_softmax(1)
    centred = plain - plain.mean(1, keepdim=True)
    for name, of_side in sums.items():
        own = logits[name].log_softmax(1)
        of_side.loss -= float(own.gather(1, following[:, None]).sum())
        of_side.divergence += float((law.exp() * (law - own)).sum())
        of_side.difference += float((logits[name] - logits[name].mean(1, keepdim=True) - centred).square().sum())
        of_side.size += float(centred.square().sum())


def _row(model: str, side: str, sums: _Sums, num_positions: int) -> dict[str, Any]:
    return {
        "model": model,
        "side": side,
        "positions": num_positions,
        "perplexity": math.exp(sums.loss / num_positions),
        "divergence": sums.divergence / num_positions,
        "logit_error": math.sqrt(sums.difference / sums.size),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    title = f"{rows[0]['model']}, {rows[0]['positions']} positions"
    shown = table("side", "perplexity", "of float32", "divergence, nats", "logits' error", title=title)
    for row in rows:
        ratio = row["perplexity"] / rows[0]["perplexity"]
        shown.add_row(
            row["side"],
            f"{row['perplexity']:.3f}",
            f"{ratio:.5f}",
            f"{row['divergence']:.6f}",
            f"{row['logit_error']:.5f}",
        )
    return shown


if __name__ == "__main__":
    typer.run(main)
