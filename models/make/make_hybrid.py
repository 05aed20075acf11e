"""The steps that make `demo-hybrid` and `demo-hybrid-eagle3`.

They make the language model, its own text, its MTP layer and its EAGLE-3 head, their export and figures.
"""

from __future__ import annotations

from pathlib import Path

from models.make.head_samples import HELD_OUT_FILES
from models.make.steps import Step, repeated

# Options of the MTP layer's training; all others are the command's defaults.
MTP_OPTIONS = ("--steps", "260", "--lr", "4e-3", "--optimizer", "muon", "--ttt-steps", "3")
# Options of the EAGLE-3 head's training. It reads the hidden state after each recurrent layer; vLLM uses the same
# numbers.
EAGLE3_OPTIONS = (
    *("--steps", "400", "--lr", "4e-3", "--optimizer", "muon", "--ttt-steps", "3", "--draft-vocab-size", "3072"),
    *("--no-save-embedding", "--feature-layer", "1", "--feature-layer", "2", "--feature-layer", "3"),
)
EAGLE3_NAME = "demo-hybrid-eagle3"


def hybrid_steps(work_dir: Path, models_dir: Path, resume_hybrid: bool) -> list[Step]:
    """Returns the steps in order.

    They need the corpus, its tokens and the demo target, whose embeddings the hybrid starts from.
    """
    folder, base, out = work_dir / "hybrid", models_dir / "demo-target", models_dir / "demo-hybrid"
    model, work = str(folder / "target"), ("--work-dir", str(work_dir))
    shape = ("--shape", "hybrid", "--embedding-from", str(base), "--tokenizer-dir", str(base))
    sizes = ("--num-batches", "6", "--num-corpus-rows", "512")
    resume = ("--resume",) if resume_hybrid else ()
    return [
        Step("hybrid", "models.make.train_lm", (*shape, *work, "--out", model, *resume)),
        Step(
            "hybrid-samples",
            "models.make.head_samples",
            (*work, "--target-dir", model, "--out-dir", str(folder), *sizes),
        ),
        _train(folder, "mtp", model, MTP_OPTIONS),
        _export(folder, "mtp", model, out),
        # The finished hybrid has the same weights, and the name that the head's config must have.
        _train(folder, "eagle3", str(out), ("--target-name", out.name, *EAGLE3_OPTIONS)),
        _export(folder, "eagle3", str(out), models_dir / EAGLE3_NAME, "--target-name", out.name),
        Step(
            "hybrid-evaluation",
            "models.make.hybrid_rounds",
            (
                *("--target-dir", str(out), "--eagle3-dir", str(models_dir / EAGLE3_NAME)),
                *("--samples-dir", str(folder), "--out", str(models_dir / "hybrid-evaluation.json")),
            ),
        ),
    ]


def _train(folder: Path, method: str, target: str, options: tuple[str, ...]) -> Step:
    samples = (folder / "own.npy", folder / "corpus.npy")
    arguments = (
        *("train", "--method", method, "--target", target, "--output", str(folder / method), "--resume"),
        *repeated("--data", samples),
        *repeated("--eval-data", [folder / name for name in HELD_OUT_FILES.values()]),
        *("--seq-len", "256", "--batch-size", "4", "--warmup-steps", "15"),
        *("--eval-every", "130", "--checkpoint-every", "20"),
        *options,
    )
    return Step(f"hybrid-{method}", "outrider.training", arguments)


def _export(folder: Path, method: str, target: str, out: Path, *options: str) -> Step:
    arguments = ("export", "--run", str(folder / method), "--target", target, "--output", str(out), *options)
    return Step(f"hybrid-{method}-export", "outrider.training", arguments)
