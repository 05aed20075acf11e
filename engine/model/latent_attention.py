"""Makes transformers' latent attention modules cache latents instead of heads, where that is proved to be the same.

transformers' modules compute the heads in a method of their own, `expand_kv`, from the latents. It is replaced by ours
(attention/latent); projections, norms, rotation and scaling stay the module's. No architecture is known by name here. A
module whose proof fails, or raises, keeps its heads. Runs on a model that the guards have probed, before make_lean.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.attention.latent import LATENT_HEADS, LatentHeads
from outrider.engine.attention.layer import AttentionProbe, PagedContext
from outrider.engine.attention.ops import AttentionOps
from outrider.engine.attention.paged_kv import PagedKVCache
from outrider.engine.model.coded_weights import CodedLinear
from outrider.engine.model.lean import lean_check
from outrider.engine.model.lean.module_calls import (
    NUM_ROWS,
    ModuleCall,
    Probe,
    random_rows,
    record_calls,
    with_hidden_states,
)

logger = logging.getLogger(__name__)


@torch.inference_mode()
def keep_latents(model: torch.nn.Module, ops: AttentionOps, *, max_positions: int, probe: Probe) -> int:
    """Changes modules in place; returns their number. probe: as for lean.make_lean."""
    names = [name for name, module in model.named_modules() if _has_latents(module)]
    if not names:
        return 0
    calls = record_calls(model, names, ops, max_positions, probe)
    known: dict[Any, bool] = {}  # signature -> whether the proof holds
    for name in names:
        module: Any = model.get_submodule(name)
        signature = lean_check.signature(module)
        if signature not in known:
            known[signature] = _is_proved(module, calls.get(name, []), ops)
        if known[signature]:
            _keep_latents(module, next(model.parameters()).dtype, ops)
    num_changed = sum(hasattr(model.get_submodule(name), LATENT_HEADS) for name in names)
    logger.info("%d of %d layers with latent attention cache their latents", num_changed, len(names))
    return num_changed


def _has_latents(module: torch.nn.Module) -> bool:
    return callable(getattr(module, "expand_kv", None)) and "kv_b_proj" in module._modules


def _keep_latents(module: Any, dtype: torch.dtype, ops: AttentionOps) -> None:
    """Makes a module cache latents. Raises AttributeError or RuntimeError if it lacks a part."""
    linear: torch.nn.Linear | CodedLinear = module.kv_b_proj
    plain = linear.plain(dtype) if isinstance(linear, CodedLinear) else linear
    if plain._parameters.get("bias") is not None:
        raise AttributeError("kv_b_proj has a bias")
    weight = plain.weight.detach()
    heads = LatentHeads(weight, int(module.qk_nope_head_dim), int(module.v_head_dim), ops.row_backend)
    del module.kv_b_proj
    setattr(module, LATENT_HEADS, heads)
    module.expand_kv = heads.as_one_head


def _is_proved(module: Any, calls: list[ModuleCall], ops: AttentionOps) -> bool:
    """Returns whether both forms compute the same: in fp32, and to rounding in the model's dtype."""
    kind = type(module).__name__
    try:
        if len(calls) != 1:
            raise ValueError(f"it is called {len(calls)} times in a forward")
        dtype = calls[0].hidden_states.dtype
        tried = [lean_check.wide_copy(module)]
        if dtype != torch.float32:
            tried.append(lean_check.plain_copy(module, dtype))
        holds = all(_computes_the_same(each, calls[0], ops) for each in tried)
    except Exception as error:  # an optimisation must not stop a load
        logger.warning("%s caches keys and values of all heads, since its proof raised %r", kind, error)
        return False
    if not holds:
        logger.warning("%s caches keys and values of all heads: from latents it computes something else", kind)
    return holds


def _computes_the_same(copied: Any, call: ModuleCall, ops: AttentionOps) -> bool:
    """Compares the copy's output before and after its change, on random rows at the positions of the call."""
    dtype = next(copied.parameters()).dtype
    rows = random_rows(call.hidden_states).to(dtype)
    copied.layer_idx = 0
    theirs = _output(copied, call, rows, ops)
    _keep_latents(copied, dtype, ops)
    return lean_check.is_close(_output(copied, call, rows, ops), theirs)


def _output(module: Any, call: ModuleCall, rows: torch.Tensor, ops: AttentionOps) -> torch.Tensor:
    """Returns the module's output [1, NUM_ROWS, H] for the rows, as a prompt in a cache of its own."""
    args, kwargs = with_hidden_states(call, rows)
    probe = AttentionProbe({})
    module(*args, **{**kwargs, "paged": PagedContext(ops, probe=probe)})
    cache = PagedKVCache(
        [probe.layers[0]], num_blocks=1, block_size=NUM_ROWS, dtype=rows.dtype, device=rows.device, ops=ops
    )
    batch = build_batch([SessionRows([0] * NUM_ROWS, 0, [0], NUM_ROWS)], NUM_ROWS, rows.device)
    output = module(*args, **{**kwargs, "paged": PagedContext(ops, batch, cache)})
    attended: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return attended
