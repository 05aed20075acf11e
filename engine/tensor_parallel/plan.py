"""Reads transformers' tensor-parallel plan of a model: a style for each module to cut. Unknown styles are refused.

Not here: cutting (sharding, experts).
"""

from __future__ import annotations

import re

import torch

from outrider.engine.errors import ModelRefused

COLWISE, ROWWISE, EXPERTS = "colwise", "rowwise", "moe_tp_experts"
FIX = "serve it without tensor parallelism (tensor_parallel_size=1)"
HEAD = "lm_head"
# Replicated here: the embedding, and parts that the plan gathers again inside a layer.
_KEPT_WHOLE = frozenset(
    {"embedding_rowwise", "replicated_with_grad_allreduce", "colwise_gather_output", "rowwise_split_input"}
)
# Parameters of a mixture of experts that experts.cut_experts cuts together.
_EXPERT_STYLES = {"gate_up_proj": "packed_colwise", "down_proj": ROWWISE}


def read_plan(path: str, model: torch.nn.Module) -> dict[str, str]:
    """Maps the name of every module to cut, without HEAD -> COLWISE, ROWWISE or EXPERTS. Raises ModelRefused."""
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    if not plan:
        raise ModelRefused(path, f"{type(model).__name__} has no tensor-parallel plan", FIX)
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    styles = {name: style for name in names if (style := plan.get(re.sub(r"\d+", "*", name))) is not None}
    for name in [name for name, style in styles.items() if style == EXPERTS]:
        for parameter, style in _EXPERT_STYLES.items():
            if styles.get(f"{name}.{parameter}") == style:
                del styles[f"{name}.{parameter}"]
    unknown = sorted(set(styles.values()) - _KEPT_WHOLE - {COLWISE, ROWWISE, EXPERTS})
    if unknown:
        cause = f"the plan of {type(model).__name__} asks for {', '.join(unknown)}, which is not known here"
        raise ModelRefused(path, cause, FIX)
    cut = {name: style for name, style in styles.items() if style not in _KEPT_WHOLE and name != HEAD}
    if not cut:
        raise ModelRefused(path, f"the plan of {type(model).__name__} cuts none of its layers", FIX)
    return cut
