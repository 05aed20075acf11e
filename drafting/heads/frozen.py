"""The target's embedding and output head inside a draft head: used, never trained, not in its state dict.

The weight is a non-persistent buffer, so `parameters()` and `state_dict()` have only the head's own. FrozenLinear keeps
nn.Linear's forward, so engine.model.row_invariance replaces it like any other. Beside a loaded target a head has that
target's own modules (`use_targets`), which may hold them quantised.
Not here: reading them from the target's checkpoint (drafting.checkpoints.target_weights).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outrider.drafting.heads.errors import HeadConfigError, require_shape


class FrozenLinear(nn.Linear):
    """Maps x [..., H] -> x @ weight.T for weight [V, H]; no bias."""

    def __init__(self, weight: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight.detach(), persistent=False)
        self.register_parameter("bias", None)


class FrozenEmbedding(nn.Embedding):
    """Maps token ids [...] -> rows [..., H] of weight [V, H]."""

    def __init__(self, weight: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False
        self.register_buffer("weight", weight.detach(), persistent=False)


def build_embedding(owner: str, shape: tuple[int, int], *, has_own: bool, target: torch.Tensor | None) -> nn.Embedding:
    """Builds the head's own embedding [V, H], initialised from the target's if given, or the frozen target's.

    The head's own is not trainable unless the caller enables gradients.
    """
    _require_target(owner, "embedding", shape, has_own, target)
    if not has_own and target is not None:
        return FrozenEmbedding(target)
    embedding = nn.Embedding(*shape)
    embedding.weight.requires_grad_(False)
    if target is not None and not embedding.weight.is_meta:
        embedding.weight.copy_(target)
    return embedding


def build_lm_head(owner: str, shape: tuple[int, int], *, has_own: bool, target: torch.Tensor | None) -> nn.Linear:
    """Builds the head's own trainable output head [V, H], initialised from the target's if given, or the frozen one."""
    _require_target(owner, "lm_head", shape, has_own, target)
    if not has_own and target is not None:
        return FrozenLinear(target)
    lm_head = nn.Linear(shape[1], shape[0], bias=False)
    if target is not None and not lm_head.weight.is_meta:
        with torch.no_grad():
            lm_head.weight.copy_(target)
    return lm_head


def use_targets(head: nn.Module, target: Any) -> None:
    """Replaces what the head has frozen by the modules of its loaded target, a transformers model: a copy less."""
    for name, own in list(head.named_children()):
        if isinstance(own, FrozenEmbedding) and embeds_plainly(target):
            setattr(head, name, target.get_input_embeddings())
        elif isinstance(own, FrozenLinear):
            setattr(head, name, target.get_output_embeddings())


def embeds_plainly(target: Any) -> bool:
    """Returns whether a transformers model takes its embedding's rows as they are, as heads do; Gemma scales them."""
    return type(target.get_input_embeddings()).forward is nn.Embedding.forward


def _require_target(owner: str, name: str, shape: tuple[int, int], has_own: bool, target: torch.Tensor | None) -> None:
    if target is not None:
        require_shape(owner, name, target.shape, shape)
    elif not has_own:
        raise HeadConfigError(f"{owner}: it has no {name} of its own and none was given", param=name)
