"""Writes the model cards (README.md of each model folder) from measured figures.

Reads the corpus manifest, the training history, the steps' durations and `evaluation.json`.
Run: `python -m models.make.model_cards --help`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.training.errors import CorpusError

TARGET_CARD = """# demo-target

A Llama of {target_parameters:.1f} M parameters (width 320, 6 layers, 5 heads of 64, vocabulary 4,096, tied \
embeddings) that writes Python-looking text. It exists to show speculative decoding on a laptop: `demo-draft` speaks \
its language and is {ratio:.0f} times smaller. It is a toy. It does not answer questions, its code rarely runs, and \
it should not be used for anything else.

## Training
{train_tokens:.1f} M tokens in {steps} steps of 4,096 on CPU (bf16 autocast, Muon and AdamW, sequences of 512, the \
last part 1,024), {target_minutes:.0f} minutes. Held-out loss {history_loss:.3f} at the end (32 sequences of 512).

## Evaluation
Held-out loss **{target_loss:.3f}** nats per token, perplexity **{target_perplexity:.1f}**, over {heldout_tokens:,} \
tokens of files never trained on. Entropy of its law along its own samples at temperature 1: {entropy:.2f} nats.

## Data
{train_chars:.1f} M characters of Python source as found on the machine it was trained on: the standard library \
(PSF licence) and parts of the packages below, each under a permissive licence (MIT, BSD, Apache-2.0). Versions:
{packages}.
{chat_percent:.1f} % are chat documents made from the same files: a request built from a function's docstring, \
answered by the function's source. {heldout_chars:.2f} M characters (whole files, chosen by hash) were held out. \
The model may repeat fragments of this source; their licences apply to them.

## Format
HF `LlamaForCausalLM`, bf16 safetensors, fast tokenizer with a chat template (system, user, assistant). Stop ids: \
`<|endoftext|>` (0) and `<|end|>` (4). No BOS is added. Remake it with `make models`; see `docs/models.md`.
"""

DRAFT_CARD = """# demo-draft

A Llama of {draft_parameters:.1f} M parameters (width 192, 2 layers, 3 heads of 64) distilled from `demo-target`, with \
the same tokenizer. Only good for drafting: alone it is a worse toy than its target.

## Training
KL divergence to the target's law plus 0.1 x cross-entropy, three rows of four from {continuation_tokens:.1f} M tokens \
that the target itself wrote after training prompts (half greedy or nearly so, half at temperatures 0.8 to 1), the \
rest corpus text. Writing them took {continuations_minutes:.0f} minutes on CPU, distillation {draft_minutes:.0f}.

## Evaluation
Held-out loss {draft_loss:.3f} nats per token, perplexity {draft_perplexity:.1f}. Along the target's continuations \
of held-out prompts ({positions:,} positions each):

| | temperature 0 | temperature 1 |
|---|---|---|
| chance that a draft token is accepted | {accept_0:.3f} (argmaxes agree) | {accept_1:.3f} (1 - total variation) |
{accepted_rows}

The rows k are accepted draft tokens per step of the target when k are drafted; the target adds one of its own. At \
temperature 1 the target itself is unsure ({entropy:.1f} nats of entropy a token), which no draft predicts well. \
Greedy text of so small a target tends to fall into loops, which are easy to draft.

## Data, format, limits
As for `demo-target`.
"""


def read_made(path: Path) -> Any:
    """Reads the JSON that an earlier step wrote. Raises CorpusError."""
    if not path.exists():
        raise CorpusError(f"{path} is missing: run the earlier steps of `python -m models.make.make_models` first")
    return json.loads(path.read_text(encoding="utf-8"))


def card_values(work_dir: Path, models_dir: Path) -> dict[str, Any]:
    """Returns all values of the two templates, from the files of the earlier steps."""
    figures, manifest = read_made(models_dir / "evaluation.json"), read_made(work_dir / "manifest.json")
    history = read_made(work_dir / "target-history.json")
    minutes = {
        f"{name}_minutes": read_made(work_dir / f"{name}.done")["seconds"] / 60
        for name in ("target", "continuations", "draft")
    }
    cold, warm = figures["temperature_0"], figures["temperature_1"]
    columns = (cold["accepted_tokens_by_draft_len"], warm["accepted_tokens_by_draft_len"])
    rows = [
        f"| k = {index + 1} | {at_0:.2f} | {at_1:.2f} |"
        for index, (at_0, at_1) in enumerate(zip(*columns, strict=True))
    ]
    versions = [f"{name} {version}" for name, version in manifest["versions"].items()]
    parameters = figures["parameters"]
    return minutes | {
        "target_parameters": parameters["target"] / 1e6,
        "draft_parameters": parameters["draft"] / 1e6,
        "ratio": parameters["target"] / parameters["draft"],
        "steps": int(history[-1]["step"]),
        "train_tokens": history[-1]["step"] * 4096 / 1e6,
        "history_loss": history[-1]["heldout"],
        "target_loss": figures["heldout_loss"]["target"],
        "draft_loss": figures["heldout_loss"]["draft"],
        "target_perplexity": figures["heldout_perplexity"]["target"],
        "draft_perplexity": figures["heldout_perplexity"]["draft"],
        "heldout_tokens": figures["heldout_tokens"],
        "entropy": warm["target_entropy_nats"],
        "train_chars": manifest["train"]["chars"] / 1e6,
        "heldout_chars": manifest["heldout"]["chars"] / 1e6,
        "chat_percent": 100 * manifest["train"]["chat_chars"] / manifest["train"]["chars"],
        "packages": ", ".join(versions),
        "continuation_tokens": (work_dir / "continuations.npy").stat().st_size / 2 / 1e6,
        "positions": cold["positions"],
        "accept_0": cold["per_token"],
        "accept_1": warm["per_token"],
        "accepted_rows": "\n".join(rows),
    }


def main(
    work_dir: Annotated[Path, typer.Option(help="manifest, history and stamps")] = Path(".run/training"),
    models_dir: Annotated[Path, typer.Option(help="folder of the two models and evaluation.json")] = Path("models"),
) -> None:
    """Write models/demo-target/README.md and models/demo-draft/README.md.

    Example: python -m models.make.model_cards
    """
    values = card_values(work_dir, models_dir)
    for name, template in (("demo-target", TARGET_CARD), ("demo-draft", DRAFT_CARD)):
        (models_dir / name / "README.md").write_text(template.format(**values), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
