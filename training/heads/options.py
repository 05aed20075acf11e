"""The shape of a new head and the settings of its objective; zeros mean the method's or the target's own value.

One dataclass for all methods: which method reads which field stands beside it. It has no command of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training.errors import SettingError

METHODS = ("medusa", "mlp_speculator", "eagle", "eagle3", "draft_model")


@dataclass(frozen=True)
class HeadOptions:
    """Counts, widths, and switches."""

    num_heads: int = 4  # medusa: heads; mlp_speculator: steps
    num_layers: int = 0  # medusa: residual blocks per head; eagle, draft_model: layers
    inner_dim: int = 0  # mlp_speculator: width of its state; draft_model: hidden size
    intermediate_size: int = 0  # eagle, eagle3, draft_model: width of the MLP
    num_attention_heads: int = 0  # eagle, eagle3, draft_model
    share_lm_head: bool = True  # medusa: all heads read out through the target's head
    tie_weights: bool = True  # mlp_speculator: all steps share one embedding and one output head
    distil: bool = True  # medusa, mlp_speculator: labels are the target's law, not one token
    ttt_steps: int = 0  # eagle, eagle3: steps of training-time test; 0: 1 and 5
    law_weight: float = 0.1  # eagle: of the soft cross-entropy; regression of the feature counts 1
    feature_noise: float = 0.1  # eagle: half the width of the uniform noise on the features
    draft_vocab_size: int = 0  # eagle3: the so many most frequent tokens of the data
    feature_layers: tuple[int, ...] = ()  # eagle3: target hidden layers, HF numbering
    norm_before_residual: bool = True  # eagle3
    norm_output: bool = False  # eagle3: its norm is part of the feature that goes back in
    save_embedding: bool = True  # eagle, eagle3: a copy of the target's embedding goes in the checkpoint
    init: Path | None = None  # draft_model: start from this checkpoint

    def check(self, method: str) -> None:
        """Raises SettingError naming the option."""
        if method not in METHODS:
            raise SettingError(f"--method {method!r}: must be one of {', '.join(METHODS)}")
        if self.num_heads < 1:
            raise SettingError(f"--num-heads must be at least 1, not {self.num_heads}")
        sizes = ("num_layers", "inner_dim", "intermediate_size", "num_attention_heads", "ttt_steps", "draft_vocab_size")
        for name in (*sizes, "feature_noise", "law_weight"):
            if getattr(self, name) < 0:
                raise SettingError(f"--{name.replace('_', '-')} must not be negative, not {getattr(self, name)}")
        if method == "mlp_speculator" and self.tie_weights and self.num_heads < 2:
            raise SettingError("--num-heads must be at least 2 with --tie-weights: there is nothing to tie")
