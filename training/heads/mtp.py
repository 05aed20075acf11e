"""The objective of a target's MTP layer: soft cross-entropy to the target's distribution at every step.

The steps are those of training-time test (HASS, arXiv 2408.15766). Published layers were trained with their target,
each for one step from the target's hidden state (DeepSeek-V3, arXiv 2412.19437, section 2.2). Here the target is
frozen, and the one layer is fed its own output for the later steps, as in service. Step k has weight 0.8^k.
"""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.drafting.checkpoints.export_mtp import export_mtp, require_exportable
from outrider.drafting.checkpoints.mtp import load_mtp, new_mtp
from outrider.drafting.heads.frozen import FrozenEmbedding, FrozenLinear
from outrider.drafting.heads.mtp import MtpHead
from outrider.shared.checkpoint.mtp_layers import stores_mtp_layer
from outrider.shared.errors import ConfigError
from outrider.training.errors import SettingError
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.options import HeadOptions
from outrider.training.heads.training_time_test import TrainingTimeTest
from outrider.training.heads.ttt_attention import TTT_ATTENTION, register_ttt_attention

# steps; default number in training; the draft length that MTP layers are commonly served with
DEFAULT_TTT_STEPS = 3


class MtpObjective(TrainingTimeTest):
    head: MtpHead

    def __init__(self, head: MtpHead, target_dir: Path, ttt_steps: int = DEFAULT_TTT_STEPS) -> None:
        """Takes head, with the attention and experts of transformers; its attention is replaced."""
        super().__init__()
        register_ttt_attention()
        head.model.set_attn_implementation(TTT_ATTENTION)
        self.head, self._target_dir, self.ttt_steps = head, target_dir, ttt_steps
        self.feature_layers = head.feature_layers

    def export(self, out: Path, dtype: torch.dtype, target_name: str) -> None:
        """Writes the whole target with this layer, which is in no other file."""
        export_mtp(self.head, self._target_dir, out, dtype)


def build_mtp(options: HeadOptions, target: FrozenTarget) -> MtpObjective:
    """Builds the target's own layer, or a new one where its files have none. Raises SettingError, CheckpointRefused."""
    try:
        is_there = stores_mtp_layer(target.path)
    except ConfigError as error:
        raise SettingError(f"--target {target.path}: {error.message}") from error
    require_exportable(target.path)
    # float32, since the norm reads it. The output head is the target's, unchanged.
    ends = {"embedding": FrozenEmbedding(target.embedding.float()), "lm_head": FrozenLinear(target.lm_head)}
    head = load_mtp(target.path, torch.float32, **ends) if is_there else new_mtp(target.path, **ends)
    head.requires_grad_(True)
    head.model.set_experts_implementation("eager")  # the engine's has no gradient
    return MtpObjective(head, target.path, options.ttt_steps or DEFAULT_TTT_STEPS)
