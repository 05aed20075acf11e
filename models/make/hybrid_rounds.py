"""Measures tokens per round of the hybrid's MTP layer, its EAGLE-3 head and n-grams, along its own held-out text.

The text was written greedily by transformers. A round drafts k tokens, keeps those that agree with the text, and adds
one; the mean is over all rounds, also those without a draft. An untrained layer is measured as well. Also here, as for
heads (agreement.py): acceptance by draft position. Not here: tokens per second (benchmarks/hybrid/methods.py).
Run: `python -m models.make.hybrid_rounds --help`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from models.make.agreement import load_for_measuring, score
from models.make.head_samples import HELD_OUT_FILES
from outrider.drafting.checkpoints.mtp import load_mtp, new_mtp
from outrider.drafting.heads.frozen import FrozenEmbedding, FrozenLinear
from outrider.drafting.methods.ngram import NgramMethod
from outrider.drafting.session import DraftSession
from outrider.drafting.settings import LookupSettings
from outrider.shared.messages import DraftStep, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.training.data.head_data import load_windows
from outrider.training.data.tokenize_rows import RowEncoder
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.interface import Objective
from outrider.training.heads.mtp import MtpObjective
from outrider.training.replay import Propose, head_drafter, tokens_per_round

DRAFT_LENS = (1, 3, 5)


def ngram_drafter(text: list[int], prompt_len: int) -> Propose:
    """Returns the served n-gram method with its default settings."""
    settings = LookupSettings()
    method = NgramMethod(prompt_lookup_min=settings.prompt_lookup_min, prompt_lookup_max=settings.prompt_lookup_max)
    prompt = text[:prompt_len]
    spec = SessionSpec("row", 0, tuple(prompt), (), SamplingParams(), SpeculationMode.EXACT, 0)
    session = DraftSession(spec, prompt, lambda _reply: None)
    method.open(session)

    def propose(known: list[int], count: int) -> list[int]:
        start = session.committed_len
        session.report(DraftStep(0, start, tuple(known[prompt_len + start :]), count))
        return list(method.propose([session])[0].token_ids)

    return propose


def measure(target_dir: Path, eagle3_dir: Path, samples_dir: Path) -> dict[str, Any]:
    """Returns all figures, as plain data."""
    target, encode = FrozenTarget(target_dir, torch.float32), RowEncoder(target_dir)
    trained = MtpObjective(load_mtp(target_dir, torch.float32), target_dir).eval()
    torch.manual_seed(0)
    ends = {"embedding": FrozenEmbedding(target.embedding), "lm_head": FrozenLinear(target.lm_head)}
    untrained = MtpObjective(new_mtp(target_dir, **ends), target_dir).eval()
    eagle3: Any = load_for_measuring(eagle3_dir, target)
    lines = (samples_dir / HELD_OUT_FILES[0.0]).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    drafters = {
        "mtp": head_drafter(trained.head, target),
        "mtp, untrained": head_drafter(untrained.head, target),
        "eagle3": head_drafter(eagle3.head, target),
        "ngram": ngram_drafter,
    }
    heads: dict[str, Objective] = {"mtp": trained, "eagle3": eagle3}
    figures: dict[str, Any] = {
        "parameters": {
            "target": sum(tensor.numel() for tensor in target.model.parameters()),
            **{name: sum(tensor.numel() for tensor in head.parameters()) for name, head in heads.items()},
        },
        "held_out_prompts": len(rows),
        "tokens_per_round": {
            name: {str(count): round(tokens_per_round(rows, count, drafter), 3) for count in DRAFT_LENS}
            for name, drafter in drafters.items()
        },
    }
    for name, objective in heads.items():
        figures[name] = {}
        for temperature, file in HELD_OUT_FILES.items():
            windows = load_windows([samples_dir / file], encode, target.vocab_size, seq_len=2048)
            scores = score(objective, target, windows)
            figures[name][f"temperature_{temperature:g}"] = scores.means() | {"positions": int(scores.num_positions[0])}
    return figures


def main(
    target_dir: Annotated[Path, typer.Option(help="the finished hybrid")] = Path("models/demo-hybrid"),
    eagle3_dir: Annotated[Path, typer.Option(help="its EAGLE-3 head")] = Path("models/demo-hybrid-eagle3"),
    samples_dir: Annotated[Path, typer.Option(help="of models.make.head_samples")] = Path(".run/training/hybrid"),
    out: Annotated[Path, typer.Option(help="JSON file for the figures")] = Path("models/hybrid-evaluation.json"),
    threads: Annotated[int, typer.Option()] = 2,
) -> None:
    """Measure drafting for the hybrid.

    Example: python -m models.make.hybrid_rounds
    """
    torch.set_num_threads(threads)
    figures = measure(target_dir, eagle3_dir, samples_dir)
    out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    typer.echo(json.dumps(figures, indent=1))


if __name__ == "__main__":
    typer.run(main)
