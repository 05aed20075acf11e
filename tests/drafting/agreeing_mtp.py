"""Random targets whose MTP layer agrees with them, always or now and then; one of them with a tokenizer, to serve."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from tests.drafting.mtp_targets import HIDDEN, MtpTarget, save_mtp_target

_DEMO = Path(__file__).parents[2] / "models" / "demo-target"
# What attention, recurrence and experts add to the embedding goes through one of these.
_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
# of the served hybrid: three to six in ten drafted tokens are right
_SERVED_WEIGHT = 0.05


def agreeing(target: MtpTarget, folder: Path, weight: float) -> Path:
    """The target with `weight` times what its layers add to the embedding, and an MTP layer that takes the last token's
    embedding alone. 0: the next token depends on the last one alone, and the layer is always right.
    """
    names, lies_at = target.family.names, 0.0 if target.family.one_plus_weight else 1.0
    changed = {name: weight * tensor if name.endswith(_OUTPUTS) else tensor for name, tensor in target.tensors.items()}
    changed[names["fc"]] = torch.eye(HIDDEN, 2 * HIDDEN)
    changed[names["enorm"]] = torch.full((HIDDEN,), lies_at)
    changed[names["norm"]] = changed["model.norm.weight"]
    return target.rewritten(folder, changed)


def save_served_hybrid(folder: Path, *, max_model_len: int = 2048) -> Path:
    """A random Qwen3.5 with recurrent layers, an MTP layer, and the tokenizer and chat template of the demo."""
    target = save_mtp_target(
        "qwen3_5",
        folder.with_name(f"{folder.name}-random"),
        vocab_size=4096,
        max_position_embeddings=max_model_len,
        bos_token_id=0,
        eos_token_id=[0, 4],
    )
    agreeing(target, folder, _SERVED_WEIGHT)
    shutil.rmtree(target.folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(_DEMO / name, folder)
    return folder
