"""Reads out logits: the output head of a causal LM, and whatever scales or caps its logits.

Running it apart from the body gives logits for a slice of positions at a time. Not here: the slices (sliced_loss.py).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast


@dataclass
class _States(BaseModelOutputWithPast):  # type: ignore[misc]
    """The last hidden states alone; all else that a body may return (router logits, cross attentions) is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _GivenStates(nn.Module):
    """Stands in for the body: its input embeddings are the last hidden states."""

    def forward(self, *_args: Any, inputs_embeds: torch.Tensor, **_kwargs: Any) -> _States:
        return _States(last_hidden_state=inputs_embeds)


class _SomeTokens(nn.Module):
    """An output head that computes the logits of `token_ids` alone."""

    def __init__(self, head: nn.Linear, token_ids: torch.Tensor) -> None:
        super().__init__()
        self._weight = head.weight[token_ids]
        self._bias = None if head.bias is None else head.bias[token_ids]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self._weight, self._bias)


def read_out_logits(
    model: PreTrainedModel, hidden: torch.Tensor, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Maps the last hidden states [N, H] of `model`'s body -> its logits [N, V], of `token_ids` int64[V] or of all."""
    without_body = copy.copy(model)  # shares all weights; only the table of its modules is its own
    heads = {} if token_ids is None else _heads_of(model, token_ids)
    without_body._modules = {**model._modules, model.base_model_prefix: _GivenStates(), **heads}
    logits: torch.Tensor = without_body(inputs_embeds=hidden[None], use_cache=False).logits[0]
    return logits if token_ids is None or heads else logits[:, token_ids]


def _heads_of(model: PreTrainedModel, token_ids: torch.Tensor) -> dict[str, _SomeTokens]:
    """Returns the model's own output head, by its name there, for `token_ids` alone; none where it is no plain one."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return {}
    return {name: _SomeTokens(head, token_ids) for name, module in model._modules.items() if module is head}
