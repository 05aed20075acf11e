"""The steps that make `demo-hybrid`: the language model, its own text, its MTP layer, export, figures, card."""

from __future__ import annotations

from pathlib import Path

from outrider.training.demo.head_samples import HELD_OUT_FILES
from outrider.training.demo.steps import Step, repeated

# Of the MTP layer's training; what is not here is the command's default.
MTP_OPTIONS = ("--steps", "260", "--lr", "4e-3", "--optimizer", "muon", "--ttt-steps", "3")


def hybrid_steps(work_dir: Path, models_dir: Path, resume_hybrid: bool) -> list[Step]:
    """In order. They need the corpus, its tokens and the demo target, whose embeddings the hybrid starts from."""
    folder, base, out = work_dir / "hybrid", models_dir / "demo-target", models_dir / "demo-hybrid"
    model, run = str(folder / "target"), str(folder / "mtp")
    work, samples = ("--work-dir", str(work_dir)), (folder / "own.npy", folder / "corpus.npy")
    shape = ("--shape", "hybrid", "--embedding-from", str(base), "--tokenizer-dir", str(base))
    sizes = ("--num-batches", "6", "--num-corpus-rows", "512")
    resume = ("--resume",) if resume_hybrid else ()
    train = (
        *("train", "--method", "mtp", "--target", model, "--output", run, "--resume", "--seq-len", "256"),
        *repeated("--data", samples),
        *repeated("--eval-data", [folder / name for name in HELD_OUT_FILES.values()]),
        *("--batch-size", "4", "--warmup-steps", "15", "--eval-every", "260", "--checkpoint-every", "20"),
        *MTP_OPTIONS,
    )
    return [
        Step("hybrid", "demo.train_lm", (*shape, *work, "--out", model, *resume)),
        Step(
            "hybrid-samples",
            "demo.head_samples",
            (*work, "--target-dir", model, "--out-dir", str(folder), *sizes),
        ),
        Step("hybrid-mtp", "__main__", train),
        Step("hybrid-export", "__main__", ("export", "--run", run, "--target", model, "--output", str(out))),
        Step(
            "hybrid-evaluation",
            "demo.hybrid_rounds",
            (
                *("--target-dir", str(out), "--samples-dir", str(folder)),
                *("--out", str(models_dir / "hybrid-evaluation.json")),
            ),
        ),
        Step("hybrid-card", "demo.hybrid_card", (*work, "--models-dir", str(models_dir))),
    ]
