"""Records how a model calls its modules in a forward, so that a replacement can be compared on the same calls.

Not here: the comparison (lean_check).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from outrider.engine.attention.layer import AttentionProbe, PagedContext
from outrider.engine.attention.ops import AttentionOps

# rows; number of rows in the calls that are compared
NUM_ROWS = 5


@dataclass(frozen=True)
class ModuleCall:
    """The arguments with which a model calls one of its modules, taken from a forward of NUM_ROWS tokens."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def hidden_states(self) -> torch.Tensor:
        """Returns the hidden states that the module reads."""
        found: torch.Tensor = self.kwargs["hidden_states"] if "hidden_states" in self.kwargs else self.args[0]
        return found


class Probe(Protocol):
    def __call__(self, token_ids: torch.Tensor, position_ids: torch.Tensor, paged: PagedContext) -> object:
        """Runs one forward of the model over token_ids, position_ids int64 [1, T]."""
        ...


def causal_lm_probe(model: Any) -> Probe:
    def run(token_ids: torch.Tensor, position_ids: torch.Tensor, paged: PagedContext) -> object:
        last_row = torch.tensor([token_ids.shape[1] - 1], device=token_ids.device)
        return model(token_ids, position_ids=position_ids, use_cache=False, logits_to_keep=last_row, paged=paged)

    return run


def record_calls(
    model: torch.nn.Module, names: Iterable[str], ops: AttentionOps, max_positions: int, probe: Probe
) -> dict[str, list[ModuleCall]]:
    """Records how each of the named modules is called in a forward whose attention function only records.

    The forward is at the last positions that are served: a scale that depends on the position (ministral3) is 1 at the
    first ones.
    """
    calls: dict[str, list[ModuleCall]] = {}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _module, args, kwargs, name=name: calls.setdefault(name, []).append(ModuleCall(args, kwargs)),
            with_kwargs=True,
        )
        for name in names
    ]
    device = next(model.parameters()).device
    positions = torch.arange(max(0, max_positions - NUM_ROWS), max_positions, device=device)[None]
    try:
        probe(torch.zeros_like(positions), positions, PagedContext(ops, probe=AttentionProbe({})))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def random_rows(like: torch.Tensor) -> torch.Tensor:
    """Returns random rows [1, NUM_ROWS, width of `like`] with its dtype and device."""
    return torch.randn(1, NUM_ROWS, like.shape[-1], generator=torch.Generator().manual_seed(17)).to(like)


def with_hidden_states(call: ModuleCall, hidden_states: torch.Tensor) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments of the call with other hidden states, and other floating tensors in their dtype."""

    def fit(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim == 3:
            return value.to(hidden_states.dtype)
        if isinstance(value, tuple):
            return tuple(fit(part) for part in value)
        return value

    args, kwargs = [fit(value) for value in call.args], {name: fit(value) for name, value in call.kwargs.items()}
    if "hidden_states" in kwargs:
        kwargs["hidden_states"] = hidden_states
    else:
        args[0] = hidden_states
    return args, kwargs
