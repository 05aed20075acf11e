"""The base class of heads that read one feature: the target's last hidden state, after its final norm."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class LastStateConfig(Protocol):
    @property
    def num_target_layers(self) -> int: ...


class LastStateHead(nn.Module):
    """A head over the target's last hidden state. Its draft ids are the target's ids."""

    config: LastStateConfig

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Returns the target's hidden states that it reads, in transformers' numbering."""
        return (self.config.num_target_layers,)

    @property
    def target_ids(self) -> torch.Tensor | None:
        """Returns None: draft ids are target ids."""
        return None

    def fuse(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps hidden_states [..., H] -> feature [..., H]: unchanged."""
        return hidden_states
