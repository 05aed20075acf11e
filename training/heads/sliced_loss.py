"""A loss over [positions, vocabulary] that holds such arrays for one slice of positions at a time.

Each slice computes the target's distributions once for all depths; then, one depth after the other, draft logits, loss
and gradient. What remains are the gradients of the rows before the output head and of the head's parameters. They are
computed in the forward pass, as in Liger-Kernel's fused linear cross-entropy, so no logits are computed twice.
Not here: the formulas (scoring.py), which positions count (the methods).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.training.heads.interface import SLICE_BYTES, ReadOut

# bytes per position and token of the vocabulary; peak of one depth of one slice; counted: nine float32 arrays (target
# logits and probabilities, the depth's share of both, draft logits, their logarithms for either label, two gradients)
_BYTES_PER_LOGIT = 9 * 4


@dataclass(frozen=True)
class Depth:
    """One draft position: `read_out` turns rows [N, H] into draft logits [N, draft vocab].

    places int64[N], ascending: the index of each label's distribution among the target's B*T positions.
    """

    rows: torch.Tensor
    places: torch.Tensor
    read_out: ReadOut


@dataclass(frozen=True)
class TargetLaws:
    """The target at S positions: its likeliest token, and float32 probabilities of the draft's tokens [S, draft vocab].

    likeliest int64[S]: a draft id; -1 where the target's likeliest token has none.
    """

    likeliest: torch.Tensor
    probs: torch.Tensor

    def at(self, rows: torch.Tensor | slice) -> TargetLaws:
        """Returns the laws at distinct `rows`, ascending if int64[N]; without a copy if these are all."""
        if not isinstance(rows, slice) and len(rows) == len(self.probs):
            return self
        return TargetLaws(self.likeliest[rows], self.probs[rows])


# Maps (number of the depth, which of its rows, their draft logits, the target's laws there) -> summed loss, float32[].
Term = Callable[[int, slice, torch.Tensor, TargetLaws], torch.Tensor]
# Maps S of the target's B*T positions, int64[S], ascending -> the laws there.
LawsAt = Callable[[torch.Tensor], TargetLaws]


@dataclass(frozen=True)
class SlicedLoss:
    """The sum of `term` over the rows of all depths.

    parameters: every trainable one that a read-out may use. slice_bytes: most that arrays of [positions, vocab_size]
    take together.
    """

    depths: Sequence[Depth]
    parameters: Sequence[torch.Tensor]
    laws_at: LawsAt
    vocab_size: int
    term: Term
    slice_bytes: int = SLICE_BYTES

    def total(self) -> torch.Tensor:
        """Returns float32[]; it can be differentiated once, with respect to rows and parameters."""
        if not torch.is_grad_enabled():
            return self.walk(None)
        rows = [depth.rows for depth in self.depths]
        total: torch.Tensor = _Total.apply(self, *rows, *self.parameters)  # type: ignore[no-untyped-call]
        return total

    def walk(self, gradients: _Gradients | None) -> torch.Tensor:
        """Sums slice by slice; adds the gradients to `gradients`, if given."""
        places = torch.unique(torch.cat([depth.places for depth in self.depths]))
        size = max(1, self.slice_bytes // (_BYTES_PER_LOGIT * self.vocab_size))
        starts = places[::size].contiguous()
        bounds = [[*torch.searchsorted(depth.places, starts).tolist(), len(depth.places)] for depth in self.depths]
        total = torch.zeros((), device=places.device)
        for index, start in enumerate(range(0, len(places), size)):
            here = places[start : start + size]
            with torch.no_grad():
                laws = self.laws_at(here)
            for number, depth in enumerate(self.depths):
                part = slice(bounds[number][index], bounds[number][index + 1])
                if part.start == part.stop:
                    continue
                rows = depth.rows[part].detach().requires_grad_(gradients is not None)
                laws_there = laws.at(torch.searchsorted(here, depth.places[part]))
                with torch.set_grad_enabled(gradients is not None):
                    loss = self.term(number, part, depth.read_out(rows), laws_there)
                if gradients is not None:
                    gradients.add(number, part, rows, loss)
                total += loss.detach()
        return total


class _Gradients:
    """Gradients summed over slices, of each depth's rows and each parameter (None: the loss does not depend on it)."""

    def __init__(self, depths: Sequence[Depth], parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self.of_rows = [torch.zeros_like(depth.rows) for depth in depths]
        self.of_parameters: list[torch.Tensor | None] = [None] * len(parameters)

    def add(self, number: int, part: slice, rows: torch.Tensor, loss: torch.Tensor) -> None:
        """Adds the gradient of `loss`, which is of `rows`, the rows `part` of depth `number`; frees its graph."""
        with torch.autocast(rows.device.type, enabled=False):  # backward passes run outside, each step in its own dtype
            of_rows, *others = torch.autograd.grad(loss, [rows, *self._parameters], allow_unused=True)
        self.of_rows[number][part] = of_rows
        for index, gradient in enumerate(others):
            if gradient is not None:
                before = self.of_parameters[index]
                self.of_parameters[index] = gradient if before is None else before.add_(gradient)


class _Total(torch.autograd.Function):
    """Runs SlicedLoss.walk as one node of the graph. Its inputs are the rows of all depths, then the parameters."""

    @staticmethod
    def forward(ctx: Any, work: SlicedLoss, *_inputs: torch.Tensor) -> torch.Tensor:
        gradients = _Gradients(work.depths, work.parameters)
        total = work.walk(gradients)
        ctx.gradients = [*gradients.of_rows, *gradients.of_parameters]
        return total

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place: they may be as large as the head
        return None, *(None if gradient is None else gradient.mul_(outer[0]) for gradient in gradients)
