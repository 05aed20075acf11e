"""The shape of a new head and the settings of its objective; 0 means the method's or the target's own value.

One dataclass serves all methods; comments name the methods that read a field.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.training.errors import SettingError

LOSS_NAMES = ("cross_entropy", "acceptance")  # their functions are in scoring.py, which needs torch
METHODS = ("medusa", "mlp_speculator", "eagle", "eagle3", "dspark", "dflash", "mtp", "draft_model")
# Kinds of heads that can be trained further.
TRAINED_FURTHER = ("eagle3", "dspark", "dflash", "medusa")
# Options of a head's shape, which a head that is trained further has already.
_SHAPE = (
    *("num_heads", "num_layers", "inner_dim", "intermediate_size", "num_attention_heads", "share_lm_head"),
    *("tie_weights", "block_size", "markov_rank", "draft_vocab_size", "feature_layers"),
    *("norm_before_residual", "norm_output", "save_embedding"),
)


@dataclass(frozen=True)
class HeadOptions:
    """The options of all methods: counts, widths, and switches."""

    num_heads: int = 4  # medusa: heads; mlp_speculator: steps
    num_layers: int = 0  # medusa: residual blocks per head; all others but mlp_speculator and mtp: layers
    inner_dim: int = 0  # mlp_speculator: width of its state; draft_model: hidden size
    intermediate_size: int = 0  # eagle, eagle3, draft_model: width of the MLP
    num_attention_heads: int = 0  # eagle, eagle3, draft_model
    share_lm_head: bool = True  # medusa: all heads read out through the target's head
    tie_weights: bool = True  # mlp_speculator: all steps share one embedding and one output head
    loss: str = "cross_entropy"  # all: how the target's distribution is matched
    distil: bool = True  # medusa, mlp_speculator: labels are the target's distribution, not one token
    ttt_steps: int = 0  # eagle, eagle3, mtp: steps of training-time test; 0: 1, 5 and 3
    law_weight: float = 0.1  # eagle: weight of the soft cross-entropy; feature regression has 1
    feature_noise: float = 0.1  # eagle: half the width of the uniform noise on the features
    fc_bias: bool = False  # eagle: a bias in the first linear, as in SafeAILab's code; vLLM's module has none
    block_size: int = 0  # dspark, dflash: tokens of a draft
    markov_rank: int = 0  # dspark
    draft_vocab_size: int = 0  # eagle3, dspark, dflash: number of most frequent tokens in the data
    feature_layers: tuple[int, ...] = ()  # eagle3, dspark, dflash: target hidden layers, HF numbering
    norm_before_residual: bool = True  # eagle3
    norm_output: bool = False  # eagle3: its norm is part of the feature fed back
    save_embedding: bool = True  # eagle, eagle3: the checkpoint includes the target's embedding
    init: Path | None = None  # draft_model and TRAINED_FURTHER: start from this checkpoint

    def check(self, method: str) -> None:
        """Raises SettingError that names the option."""
        if method not in METHODS:
            raise SettingError(f"--method {method!r}: must be one of {', '.join(METHODS)}")
        if self.loss not in LOSS_NAMES:
            raise SettingError(f"--loss {self.loss!r}: must be one of {', '.join(LOSS_NAMES)}")
        if self.num_heads < 1:
            raise SettingError(f"--num-heads must be at least 1, not {self.num_heads}")
        if self.init is not None:
            self._check_init(method, self.init)
        sizes = (
            "num_layers",
            "inner_dim",
            "intermediate_size",
            "num_attention_heads",
            "ttt_steps",
            "draft_vocab_size",
            "block_size",
            "markov_rank",
        )
        for name in (*sizes, "feature_noise", "law_weight"):
            if getattr(self, name) < 0:
                raise SettingError(f"--{name.replace('_', '-')} must not be negative, not {getattr(self, name)}")
        if method == "mlp_speculator" and self.tie_weights and self.num_heads < 2:
            raise SettingError("--num-heads must be at least 2 with --tie-weights: there is nothing to tie")

    def _check_init(self, method: str, init: Path) -> None:
        if not (init / "config.json").is_file():
            raise SettingError(f"--init {init} is not a checkpoint folder (no config.json)")
        if method not in (*TRAINED_FURTHER, "draft_model"):
            raise SettingError(
                f"--init: a head for {method} cannot be trained further, only {', '.join(TRAINED_FURTHER)}"
            )
        given = [name for name in _SHAPE if getattr(self, name) != getattr(HeadOptions, name)]
        if given:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise SettingError(f"{names}: the shape of the head is that of --init; leave it out")
