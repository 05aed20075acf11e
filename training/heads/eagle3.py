"""EAGLE-3's objective (Li et al. 2025, arXiv 2503.01840, section 3): training-time test.

Step 0 reads features fused from three hidden layers of the target, step k the head's own output of step k-1. Every step
is matched to the target's distribution by soft cross-entropy with weight 0.8^k. No feature is regressed. The draft
vocabulary may be restricted to the data's most frequent tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from outrider.drafting.checkpoints.eagle3 import load_eagle3
from outrider.drafting.checkpoints.export import export_eagle3
from outrider.drafting.checkpoints.target_weights import TargetWeights
from outrider.drafting.heads.eagle3 import Eagle3Config, Eagle3Head, default_feature_layers
from outrider.training.errors import SettingError
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.options import HeadOptions
from outrider.training.heads.training_time_test import TrainingTimeTest
from outrider.training.heads.ttt_attention import TTT_ATTENTION, register_ttt_attention
from outrider.training.heads.unroll import decoder_config

DEFAULT_TTT_STEPS = 5
# steps; of a head that is trained further while it serves: each costs as much as the first, and a third of the drafts
# get that far
_FURTHER_TTT_STEPS = 3


class Eagle3Objective(TrainingTimeTest):
    head: Eagle3Head

    def __init__(
        self,
        head: Eagle3Head,
        target_architecture: str,
        ttt_steps: int = DEFAULT_TTT_STEPS,
        save_embedding: bool = True,
    ) -> None:
        super().__init__()
        self.head, self.ttt_steps = head, ttt_steps
        self._target_architecture, self._save_embedding = target_architecture, save_embedding
        self.feature_layers = head.feature_layers

    def export(self, out: Path, dtype: torch.dtype, target_name: str) -> None:
        export_eagle3(
            self.head,
            out,
            target=target_name,
            target_architecture=self._target_architecture,
            num_speculative_tokens=self.ttt_steps,
            with_embedding=self._save_embedding,
            dtype=dtype,
        )


def build_eagle3(options: HeadOptions, target: FrozenTarget, token_counts: npt.NDArray[np.int64]) -> Eagle3Objective:
    """Builds a new head, whose output head is initialised with the target's rows.

    If the draft vocabulary is reduced, they are those of the most frequent tokens by `token_counts` int64[vocab].
    Raises SettingError when the draft vocabulary or the feature layers do not match the target.
    """
    register_ttt_attention()
    if options.draft_vocab_size > target.vocab_size:
        raise SettingError(f"--draft-vocab-size {options.draft_vocab_size}: the target has {target.vocab_size} tokens")
    layers = options.feature_layers or default_feature_layers(target.num_layers)
    if not all(0 <= layer <= target.num_layers for layer in layers):
        raise SettingError(f"--feature-layer {list(layers)}: the target has hidden layers 0 to {target.num_layers}")
    draft_ids = most_frequent(token_counts, options.draft_vocab_size or target.vocab_size)
    is_reduced = len(draft_ids) < target.vocab_size
    config = Eagle3Config(
        decoder=decoder_config(options, target),
        feature_layers=layers,
        draft_vocab_size=len(draft_ids),
        norm_before_residual=options.norm_before_residual,
        norm_output=options.norm_output,
    )
    head = Eagle3Head(
        config,
        embedding=target.embedding.float(),  # the residual stream has its dtype
        lm_head=target.lm_head.float()[draft_ids],
        d2t=draft_ids - torch.arange(len(draft_ids)) if is_reduced else None,
        attn_implementation=TTT_ATTENTION,
    )
    return Eagle3Objective(
        head, type(target.model).__name__, options.ttt_steps or DEFAULT_TTT_STEPS, options.save_embedding
    )


def load_eagle3_objective(path: Path, target: TargetWeights) -> Eagle3Objective:
    """Reads a head to train it further. Raises CheckpointRefused, SettingError for P-EAGLE's parallel drafts."""
    register_ttt_attention()
    head = load_eagle3(path, target, torch.float32, attn_implementation=TTT_ATTENTION)
    if head.config.mask_token_id is not None:
        raise SettingError(f"{path}: a P-EAGLE head cannot be trained further")
    return Eagle3Objective(head, target.architecture, _FURTHER_TTT_STEPS, head.config.has_embedding)


def most_frequent(token_counts: npt.NDArray[np.int64], num_tokens: int) -> torch.Tensor:
    """Returns int64[num_tokens], ascending: the ids of the largest counts; ties go to the smaller id."""
    order = np.argsort(-token_counts, kind="stable")[:num_tokens]
    return torch.from_numpy(np.sort(order))
