"""The base class of recurrent mixers, which are called in place of transformers' modules."""

from __future__ import annotations

from typing import Any

import torch

from outrider.engine.attention.layer import PagedContext
from outrider.engine.errors import EngineError
from outrider.engine.recurrent.states import RecurrentShape
from outrider.kernels.recurrent.rows import LayerStates, RecurrentRows


class RecurrentMixer(torch.nn.Module):
    """One recurrent layer's mixer; its linears are the original's, or made of them.

    paged: of the running forward (adapt).
    """

    paged: PagedContext | None = None

    def __init__(self, shape: RecurrentShape, state_idx: int, hidden_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.state_idx = state_idx
        self.hidden_size = hidden_size

    def forward(
        self,
        hidden_states: torch.Tensor,
        cache_params: None = None,
        attention_mask: None = None,
        past_key_values: None = None,
        **_other: Any,
    ) -> torch.Tensor:
        """Maps hidden_states [1, T, H] -> [1, T, H]."""
        if not (cache_params is attention_mask is past_key_values is None):
            raise EngineError(f"{self.shape.module_name} has its states from `paged`, and takes no mask")
        if self.paged is None:
            raise EngineError(f"{self.shape.module_name} was called outside its model")
        if self.paged.probe is not None:
            self.paged.probe.record_mixer(self.shape)
            return torch.zeros_like(hidden_states)
        states, rows = self.paged.layer_states(self.state_idx)
        return self.mix(hidden_states[0], states, rows)[None]

    def mix(self, hidden_states: torch.Tensor, states: LayerStates, rows: RecurrentRows) -> torch.Tensor:
        """Maps hidden_states [T, H] -> [T, H]."""
        raise NotImplementedError


def require_silu(original: Any) -> None:
    """Raises ValueError for another activation after the convolution: the kernels know no other."""
    if original.activation not in ("silu", "swish"):
        raise ValueError(f"activation {original.activation}")


def convolution(conv1d: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns weight [C, K] and bias [C] of a depthwise nn.Conv1d."""
    bias = conv1d.bias
    return conv1d.weight.detach()[:, 0].contiguous(), None if bias is None else bias.detach()
