"""Hands `paged` of each forward to modules inside a model whose code drops it on the way to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def pass_on(model: torch.nn.Module, receivers: Sequence[Any]) -> None:
    """Sets the receivers' `paged` to the model's during its forwards, and to None between them."""

    def before(_model: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        for receiver in receivers:
            receiver.paged = kwargs["paged"]

    def after(*_arguments: Any) -> None:
        for receiver in receivers:
            receiver.paged = None

    after()
    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, always_call=True)
