"""Scores a draft's distribution against the target's at counted positions: the loss, and the expected acceptance.

Labels are soft: once its logits exist, the target's whole distribution costs nothing more and carries more information
than the one token sampled from it. A reduced draft vocabulary V is trained on the target's distribution within V, at
positions whose token in the text is in V: where the text was drawn from the target, such a position has the target's
mass of V as its probability, so the expected cross-entropy is that of the whole distribution over V's tokens, and the
target's logits of all other tokens need not be computed. Not here: which positions and which weights (the methods).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from outrider.training.heads.interface import DraftScores, Objective, ReadOut, TargetView
from outrider.training.heads.sliced_loss import Depth, LawsAt, SlicedLoss, TargetLaws

# factor per depth; deeper positions are reached only when all before were accepted (Medusa, EAGLE-3)
DEPTH_DECAY = 0.8
# positions; most that a training step scores; enough for a progress line, which averages several steps: scoring all
# took 15% of an EAGLE-3 step (vocabulary 4,096, CPU), scoring 256 took 7% (vocabulary 49,152). Held-out figures use
# every position.
NUM_SCORED = 64
# bytes; logits that are widened together to sum their exponentials; few enough to stay in a cache and in memory that is
# mapped already: all at once took a quarter of a step (49,152 tokens)
_CACHED_BYTES = 8 << 20
# probability; lower bound that keeps the logarithm of an acceptance finite; far below float32's resolution of a sum
# near 1
_LEAST_ACCEPTANCE = 1e-20


class _SoftCrossEntropy(torch.autograd.Function):
    """Computes -sum t log softmax(d) = sum(t) logsumexp(d) - t.d, whose gradient is sum(t) softmax(d) - t.

    Both are closed forms: recorded operation by operation, the products of [positions, vocabulary] arrays took a third
    of a step with an EAGLE-3 head of 8,192 tokens.
    """

    @staticmethod
    def forward(ctx: Any, draft_logits: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
        logits, target_mass = draft_logits.float(), target_probs.sum(-1)
        ctx.save_for_backward(draft_logits, target_probs, target_mass)
        matched = torch.bmm(target_probs[:, None], logits[:, :, None]).flatten()
        return target_mass * torch.logsumexp(logits, dim=-1) - matched

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        draft_logits, target_probs, target_mass = ctx.saved_tensors
        gradient = torch.softmax(draft_logits.float(), dim=-1).mul_(target_mass[:, None]).sub_(target_probs)
        return gradient.mul_(outer[0][:, None]).to(draft_logits.dtype), None


def soft_cross_entropy(draft_logits: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """Returns float32[N]: -sum over j of target(j) log draft(j), over the draft's tokens; both [N, draft vocab].

    A position counts by the mass of `target_probs`. Differentiable once, by the draft's logits.
    """
    with torch.autocast(draft_logits.device.type, enabled=False):  # the products are float32's
        loss: torch.Tensor = _SoftCrossEntropy.apply(draft_logits, target_probs)  # type: ignore[no-untyped-call]
    return loss


def negative_log_acceptance(draft_logits: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """Returns float32[N]: -log of sum over j of min(target(j), draft(j)), for [N, draft vocab] each.

    The sum is the acceptance of rejection sampling at temperature 1 (LK losses, arXiv 2602.23881). Its logarithm keeps
    the gradient from vanishing where little is accepted.
    """
    draft_probs = torch.softmax(draft_logits.float(), dim=-1)
    return -torch.minimum(draft_probs, target_probs).sum(-1).clamp(min=_LEAST_ACCEPTANCE).log()


LOSSES = {"cross_entropy": soft_cross_entropy, "acceptance": negative_log_acceptance}


@torch.no_grad()
def acceptance_sums(draft_logits: torch.Tensor, laws: TargetLaws) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (argmaxes that agree, summed overlap), each float32[], for draft logits [N, draft vocab]."""
    agreement = (draft_logits.argmax(-1) == laws.likeliest).sum().float()
    return agreement, torch.minimum(torch.softmax(draft_logits.float(), dim=-1), laws.probs).sum()


def whole_laws(target: TargetView, target_ids: torch.Tensor | None) -> LawsAt:
    """The target's distributions; with `target_ids` int64[draft vocab] their parts for these tokens."""
    draft_ids = None
    if target_ids is not None:
        draft_ids = target_ids.new_full((target.vocab_size,), -1)
        draft_ids[target_ids] = torch.arange(len(target_ids), device=target_ids.device)

    def at(places: torch.Tensor) -> TargetLaws:
        logits = target.read_out(target.final.flatten(0, 1)[places])
        if target_ids is None or draft_ids is None:
            return TargetLaws(logits.argmax(-1), torch.softmax(logits.float(), dim=-1))
        # Of the other tokens only their sum is needed.
        num_rows = max(1, _CACHED_BYTES // (4 * logits.shape[-1]))
        log_sums = torch.cat([torch.logsumexp(part.float(), dim=-1) for part in torch.split(logits, num_rows)])
        probs = logits[:, target_ids].float().sub_(log_sums[:, None]).exp_()
        return TargetLaws(draft_ids[logits.argmax(-1)], probs)

    return at


def laws_within(target: TargetView, target_ids: torch.Tensor) -> LawsAt:
    """The target's distributions, given that its token is one of `target_ids` int64[draft vocab]."""

    def at(places: torch.Tensor) -> TargetLaws:
        logits = target.read_out(target.final.flatten(0, 1)[places], target_ids)
        return TargetLaws(logits.argmax(-1), torch.softmax(logits.float(), dim=-1))

    return at


class DepthLosses:
    """Sums one method's losses over depths: `add` once per depth, then `result`.

    In training, estimates use at most NUM_SCORED positions per depth, evenly spread, and a reduced draft vocabulary is
    trained where the text has one of its tokens. target_ids int64[draft vocab]: the target id of each draft id, if it
    is reduced; then token_ids int64[B, T] is the text.
    """

    def __init__(
        self,
        objective: Objective,
        target: TargetView,
        target_ids: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
    ) -> None:
        self._objective, self._target = objective, target
        self._loss_of = LOSSES[objective.loss]
        self._can_be_drafted: torch.Tensor | None = None
        if target_ids is None or token_ids is None or not objective.training:
            self._laws_at, self._widest = whole_laws(target, target_ids), target.vocab_size
        else:
            self._laws_at, self._widest = laws_within(target, target_ids), len(target_ids)
            self._can_be_drafted = torch.isin(token_ids, target_ids).flatten()
        self._depths: list[Depth] = []
        # of each depth, also those where the text's token cannot be drafted
        self._nums_rows: list[int] = []
        self._weights: list[tuple[float, float]] = []
        self._labels: list[torch.Tensor | None] = []
        self._terms: list[torch.Tensor] = []

    def add(
        self,
        rows: torch.Tensor,
        read_out: ReadOut,
        where: torch.Tensor,
        offset: int,
        weight: float,
        labels: torch.Tensor | None = None,
        label_weight: float = 0.0,
    ) -> None:
        """Adds one depth: rows [N, H], one for each true (b, t) of `where` bool[B, M]; N may be 0.

        The target's distribution at t + offset is matched with `weight`, the tokens `labels` int64[N] (draft ids) by
        cross-entropy with `label_weight`; each is a mean over the rows.
        """
        batch_index, position = where.nonzero(as_tuple=True)
        places = batch_index * self._target.final.shape[1] + position + offset
        self._nums_rows.append(len(rows))
        if self._can_be_drafted is not None:
            kept = self._can_be_drafted[places + 1]  # the law at a position is that of the next token
            rows, places, labels = rows[kept], places[kept], None if labels is None else labels[kept]
        self._depths.append(Depth(rows, places, read_out))
        self._weights.append((weight, label_weight))
        self._labels.append(labels)

    def add_term(self, term: torch.Tensor) -> None:
        """Adds a further scalar to the loss."""
        self._terms.append(term)

    def result(self) -> tuple[torch.Tensor, DraftScores]:
        """Returns (scalar: the weighted sum over depths of the mean over positions; the estimates)."""
        device = self._target.final.device
        # agreement, overlap and number of positions, per depth
        scores = torch.zeros(3, len(self._depths), device=device)

        def term(number: int, part: slice, draft_logits: torch.Tensor, laws: TargetLaws) -> torch.Tensor:
            scores[:, number] += self._scores(number, part, draft_logits.detach(), laws)
            return self._loss(number, part, draft_logits, laws)

        trained = [parameter for parameter in self._objective.parameters() if parameter.requires_grad]
        slice_bytes = self._objective.slice_bytes
        total = SlicedLoss(self._depths, trained, self._laws_at, self._widest, term, slice_bytes).total()
        return torch.stack([total, *self._terms]).sum(), DraftScores(*scores)

    def _loss(self, number: int, part: slice, draft_logits: torch.Tensor, laws: TargetLaws) -> torch.Tensor:
        (weight, label_weight), labels = self._weights[number], self._labels[number]
        num_rows = max(1, self._nums_rows[number])
        loss = draft_logits.new_zeros((), dtype=torch.float32)
        if weight:
            loss = loss + weight * self._loss_of(draft_logits, laws.probs).sum() / num_rows
        if labels is not None:
            hard = F.cross_entropy(draft_logits.float(), labels[part], reduction="sum")
            loss = loss + label_weight * hard / num_rows
        return loss

    def _scores(self, number: int, part: slice, draft_logits: torch.Tensor, laws: TargetLaws) -> torch.Tensor:
        num_rows = len(self._depths[number].rows)
        stride = max(1, -(-num_rows // NUM_SCORED)) if self._objective.training else 1
        scored = slice(-part.start % stride, None, stride)
        draft_logits = draft_logits[scored]
        agreement, overlap = acceptance_sums(draft_logits, laws.at(scored))
        # Nothing is accepted where the text's token cannot be drafted.
        num_positions = len(draft_logits) * self._nums_rows[number] / num_rows
        return torch.stack([agreement, overlap, torch.tensor(num_positions, device=agreement.device)])


def counted_at(counts: torch.Tensor, depth_offset: int, num_positions: int) -> torch.Tensor:
    """Returns bool[B, num_positions]: whether token t + depth_offset is counted, per position t; false past the row."""
    shifted = counts[:, depth_offset : depth_offset + num_positions]
    return F.pad(shifted, (0, num_positions - shifted.shape[1]), value=False)


def shifted_rows(values: torch.Tensor, offset: int, where: torch.Tensor) -> torch.Tensor:
    """Returns values[b, t + offset] at the true (b, t) of `where` bool[B, N]: [count, ...], in row-major order."""
    batch_index, position = where.nonzero(as_tuple=True)
    return values[batch_index, position + offset]
