"""What a fleet serves and drafts with: the demo family, the same with heads that are swapped or that draft in one pass,
or a random hybrid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.load import METHODS
from tests.drafting.agreeing_mtp import save_served_hybrid
from tests.verifier_service.drafting.other_weights import with_noise

MODELS = Path(__file__).parents[2] / "models"


@dataclass(frozen=True)
class Target:
    """methods: that requests ask for. verifier_args: of each verifier in turn. heads: that verifiers load meanwhile."""

    model: Path
    methods: tuple[str, ...]
    drafter_args: tuple[str, ...]
    verifier_args: tuple[tuple[str, ...], ...]
    heads: tuple[Path, ...] = ()


def demo(_folder: Path) -> Target:
    return Target(
        MODELS / "demo-target",
        METHODS,
        ("--draft-model", str(MODELS / "demo-draft"), "--methods", "draft_model,ngram,suffix"),
        (("--kv-cache-mb", "64"),),
    )


def swapped(folder: Path) -> Target:
    """Verifiers that draft with an EAGLE-3 head of which other weights are loaded while they serve."""
    head = MODELS / "demo-eagle3"
    drafting = ("--local-draft-model", str(head), "--local-methods", "eagle3", "--allow-draft-loading", "true")
    return Target(
        MODELS / "demo-target",
        ("eagle3", "eagle3", "ngram", "auto", "off"),
        ("--methods", "ngram,suffix"),
        (("--kv-cache-mb", "64", *drafting),),
        (head, with_noise(head, folder / "noisy", 0.2)),
    )


def one_pass(_folder: Path) -> Target:
    """A DSpark head, alone and with suffixes behind its drafts: within the first verifier, and at drafters, which get
    hidden states in messages.
    """
    head = str(MODELS / "demo-dspark")
    memory = ("--kv-cache-mb", "64")
    return Target(
        MODELS / "demo-target",
        ("dspark", "dspark+suffix", "suffix", "auto", "off"),
        ("--draft-model", head, "--target-model", str(MODELS / "demo-target"), "--methods", "dspark,suffix"),
        ((*memory, "--local-draft-model", head, "--local-methods", "dspark,suffix"), memory),
    )


def hybrid(folder: Path) -> Target:
    """Recurrent layers and little memory, so that sessions are preempted. The first verifier makes MTP and n-gram
    drafts itself; the second's are made by drafters, with hidden states in messages.
    """
    model = save_served_hybrid(folder / "hybrid")
    memory = ("--kv-cache-mb", "1")
    return Target(
        model,
        ("mtp", "ngram", "suffix", "auto", "off"),
        ("--target-model", str(model), "--methods", "mtp,ngram,suffix"),
        ((*memory, "--local-methods", "mtp,ngram"), memory),
    )


# name -> (folder for what must be written) -> the target
TARGETS: dict[str, Callable[[Path], Target]] = {
    "demo": demo,
    "swapped": swapped,
    "one-pass": one_pass,
    "hybrid": hybrid,
}
