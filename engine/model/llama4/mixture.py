"""Llama 4's mixture of experts, computed for the experts that a row chose.

transformers sends every row through every expert, scaled by its router's score, which is 0 for most of them. Here too
the score scales an expert's input, not its output.
Not here: the experts' arithmetic (model/row_invariant_experts). The router stays transformers', and its torch functions
depend on the number of rows, so model/row_invariant_functions treats these modules as transformers'.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.engine.model.lean import lean_check
from outrider.engine.model.row_invariant_experts import experts_forward

MIXTURE_CLASS = "Llama4TextMoe"
# rows; length of the proof
_NUM_ROWS = 9


class ScaledInputExperts(torch.nn.Module):
    """The weights of transformers' module, as its experts interface describes them."""

    has_gate, has_bias, is_transposed, has_post_expert_norm = True, False, True, False
    _is_expert_parallel = False

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.num_experts = int(original.num_experts)
        self.gate_up_proj = original.gate_up_proj  # [E, H, 2 I]
        self.down_proj = original.down_proj  # [E, I, H]
        self.act_fn = original.act_fn

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return up * self.act_fn(gate)  # type: ignore[no-any-return]

    def forward(self, hidden_states: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Maps hidden_states [T, H], chosen int64 [T, k], scores [T, k] -> [T, H]."""
        num_chosen = chosen.shape[1]
        scaled = (hidden_states[:, None] * scores[..., None]).flatten(0, 1)
        ones = torch.ones_like(scores).view(-1, 1)
        outputs = experts_forward(self, scaled, chosen.view(-1, 1), ones).view(-1, num_chosen, hidden_states.shape[1])
        # Sequential additions, not sum(): the order must not depend on the shape.
        total = outputs[:, 0].float()
        for rank in range(1, num_chosen):
            total = total + outputs[:, rank].float()
        return total.to(hidden_states.dtype)


class Mixture(torch.nn.Module):
    """Replaces a mixture of experts that has a shared expert."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.top_k = int(original.top_k)
        self.router = original.router
        self.shared_expert = original.shared_expert
        self.experts = ScaledInputExperts(original.experts)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps hidden_states [..., H] -> ([T, H], the router's logits [T, E]), like the replaced module."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(rows)  # 0 for what was not chosen
        chosen = logits.topk(self.top_k, dim=1).indices
        return self.shared_expert(rows) + self.experts(rows, chosen, scores.gather(1, chosen)), logits


def prove_mixture(original: Any) -> None:
    """Raises ValueError if a transformers mixture, in fp32, computes something else than ours in its place."""
    rows = torch.randn((1, _NUM_ROWS, original.hidden_dim), generator=torch.Generator().manual_seed(11))
    if not lean_check.is_close(Mixture(original)(rows), original(rows)):
        raise ValueError("the outputs differ")
