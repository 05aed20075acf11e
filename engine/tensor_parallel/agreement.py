"""Checks at load that the ranks together compute what the whole model does.

A wrong plan for a model, or a module that takes head counts from its config, would not fail but give other tokens.
Not here: cutting (sharding), row invariance (certificate).
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.attention.layer import PagedContext
from outrider.engine.attention.ops import AttentionOps, LayerShape, resolve_attention_ops
from outrider.engine.attention.paged_kv import PagedKVCache
from outrider.engine.errors import ModelRefused

_NUM_ROWS = 8
# relative to the largest logit; on two ranks, another order of sums gives 1e-6 in fp32, 1 % in bf16; swapped heads 55 %
# or more
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


@torch.inference_mode()
def sample_logits(model: Any, shapes: list[LayerShape], ops: AttentionOps | None = None) -> torch.Tensor:
    """Returns logits [_NUM_ROWS, V] of a fixed sequence, on the CPU, in the model's dtype; ops None: the reference."""
    parameter = next(model.parameters())
    dtype, device = parameter.dtype, parameter.device
    ops = ops or resolve_attention_ops("reference", device)
    vocab_size = int(model.config.get_text_config().vocab_size)
    token_ids = torch.randint(vocab_size, (_NUM_ROWS,), generator=torch.Generator().manual_seed(29)).tolist()
    block_size = 16
    cache = PagedKVCache(shapes, num_blocks=1, block_size=block_size, dtype=dtype, device=device, ops=ops)
    batch = build_batch([SessionRows(token_ids, 0, [0], _NUM_ROWS)], block_size, device)
    output = model(
        batch.token_ids[None],
        position_ids=batch.position_ids[None],
        use_cache=False,
        logits_to_keep=batch.logits_rows,
        paged=PagedContext(ops, batch, cache),
    )
    return output.logits[0].cpu()  # type: ignore[no-any-return]


def require_agreement(path: str, whole: torch.Tensor, together: torch.Tensor) -> None:
    """Raises ModelRefused unless the ranks' logits are the whole model's up to rounding."""
    # The median over rows: in bf16 a router's near tie may send single rows to another expert.
    of_rows = (whole.float() - together.float()).abs().amax(dim=1)
    difference = float(of_rows.median() / whole.float().abs().max())
    if not difference <= _TOLERANCE[whole.dtype]:  # also catches NaN
        raise ModelRefused(
            path,
            f"cut by transformers' tensor-parallel plan, its logits are off by {difference:.1e} of the largest",
            "serve it without tensor parallelism (tensor_parallel_size=1)",
        )
