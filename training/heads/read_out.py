"""Reads out logits: the output head of a causal LM, and whatever scales or caps its logits.

Running it apart from the body gives logits for a slice of positions at a time. Not here: the slices (sliced_loss.py).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
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


def read_out_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Maps the last hidden states [N, H] of `model`'s body -> its logits [N, V]."""
    without_body = copy.copy(model)  # shares all weights; only the table of its modules is its own
    without_body._modules = {**model._modules, model.base_model_prefix: _GivenStates()}
    logits: torch.Tensor = without_body(inputs_embeds=hidden[None], use_cache=False).logits
    return logits[0]
