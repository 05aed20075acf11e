"""Lean attention modules: one linear for query, key and value, rotation in place, paged kernels, one linear.

A layer's scaling, window, softcap and sinks are recorded from the model's own module, not derived here.
Not here: when modules are replaced (lean), and the arithmetic (kernels).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.attention.layer import PagedContext, attend, paged_attention_hook
from outrider.engine.attention.ops import AttentionOps, LayerShape
from outrider.engine.attention.paged_kv import PagedKVCache
from outrider.engine.model.lean import lean_check
from outrider.engine.model.lean.lean_mlp import stack
from outrider.engine.model.lean.module_calls import NUM_ROWS, ModuleCall, random_rows, with_hidden_states
from outrider.engine.model.row_invariant_modules import RowInvariantLinear
from outrider.engine.model.row_kernels import RowKernels
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.paged_attention.arguments import BatchTables, Scoring

_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_OUTPUTS = ("o_proj", "dense", "out_proj")


@dataclass(frozen=True)
class Recorded:
    """The arguments that a module passed to its attention function, and the module's output."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key, value
    scoring: Scoring
    output: Any


class LeanAttention(torch.nn.Module):
    """Replaces a causal self-attention module that has no cache of its own."""

    def __init__(
        self,
        shape: LayerShape,
        layer_idx: int,
        linears: tuple[RowInvariantLinear, RowInvariantLinear],
        norms: tuple[torch.nn.Module, torch.nn.Module] | None,
        scoring: Scoring,
        kernels: RowKernels,
        *,
        rotates: bool,
    ) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.is_causal = True
        self.qkv, self.out = linears
        self.q_norm: torch.nn.Module | None = norms and norms[0]
        self.k_norm: torch.nn.Module | None = norms and norms[1]
        self.rotates = rotates
        self._num_query_heads, self._num_kv_heads = shape.num_query_heads, shape.num_kv_heads
        self._num_turned = shape.num_query_heads + shape.num_kv_heads
        self._head_dim = shape.key_dim
        self._scoring = scoring
        self._rotate = kernels.rotate

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        *_args: Any,
        paged: PagedContext,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Maps hidden_states [1, T, width] -> ([1, T, H], None), like the replaced module."""
        heads = self.qkv(hidden_states).view(-1, self._num_turned + self._num_kv_heads, self._head_dim)
        query, key, value = heads.split((self._num_query_heads, self._num_kv_heads, self._num_kv_heads), dim=1)
        cos, sin = position_embeddings if self.rotates and position_embeddings is not None else (None, None)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = _normalise(self.q_norm, query), _normalise(self.k_norm, key)
            if cos is not None and sin is not None:
                query, key = self._rotate(query, cos[0], sin[0]), self._rotate(key, cos[0], sin[0])
        elif cos is not None and sin is not None:
            turned = self._rotate(heads[:, : self._num_turned], cos[0], sin[0])
            query, key = turned[:, : self._num_query_heads], turned[:, self._num_query_heads :]
        if paged.probe is not None:
            first, second, third = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
            scaling, sliding_window, softcap, sinks, chunk_size = self._scoring
            attended = paged_attention_hook(
                self, first, second, third, None, paged=paged, scaling=scaling,
                sliding_window=sliding_window, softcap=softcap, s_aux=sinks, chunk_size=chunk_size,
            )[0][0]  # fmt: skip
        else:
            attended = attend(paged, self.layer_idx, (query, key, value), self._scoring)
        return self.out(attended.view(1, hidden_states.shape[1], -1)), None


def _normalise(norm: torch.nn.Module, heads: torch.Tensor) -> torch.Tensor:
    """Normalises each head if the norm's weight is one head wide (qwen3), else all heads of a row together (olmo2)."""
    weight: torch.Tensor = norm.weight  # type: ignore[assignment]
    if weight.shape[-1] == heads.shape[2]:
        return norm(heads)  # type: ignore[no-any-return]
    return norm(heads.reshape(heads.shape[0], -1)).view(heads.shape)  # type: ignore[no-any-return]


def record(
    module: torch.nn.Module, call: ModuleCall, hidden_states: torch.Tensor, shapes: list[LayerShape]
) -> Recorded:
    """Runs an attention module (the model's or ours) on hidden_states [1, NUM_ROWS, H] with recording kernels."""
    seen: dict[str, Any] = {}

    def write(key: torch.Tensor, value: torch.Tensor, *_caches: torch.Tensor) -> None:
        seen["key"], seen["value"] = key.clone(), value.clone()

    def attention(
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        tables: BatchTables,
        scoring: Scoring,
    ) -> torch.Tensor:
        seen["query"], seen["scoring"] = query.clone(), scoring
        shape = (query.shape[0], query.shape[1], value_cache.shape[3])
        generator = torch.Generator().manual_seed(23)
        return torch.randn(shape, generator=generator).to(query)

    dtype, device = hidden_states.dtype, hidden_states.device
    ops = AttentionOps("recording", attention, write, lambda *_: None)
    batch = build_batch([SessionRows([0] * NUM_ROWS, 0, [0], 1)], 2 * NUM_ROWS, device)
    cache = PagedKVCache(shapes, num_blocks=1, block_size=2 * NUM_ROWS, dtype=dtype, device=device, ops=ops)
    args, kwargs = with_hidden_states(call, hidden_states)
    kwargs["paged"] = PagedContext(ops, batch, cache)
    output = module(*args, **kwargs)
    return Recorded((seen["query"], seen["key"], seen["value"]), seen["scoring"], output)


def agree(ours: Recorded, theirs: Recorded) -> bool:
    """Returns whether two modules computed the same."""
    mine, yours = ((run.tensors, run.output, tuple(run.scoring)) for run in (ours, theirs))
    return lean_check.is_close(mine, yours)


def build(
    module: torch.nn.Module, shape: LayerShape, scoring: Scoring, kernels: RowKernels, *, rotates: bool
) -> LeanAttention | None:
    """Returns the replacement if the module has the parts for one; not yet checked."""
    projections = next((names for names in _PROJECTIONS if all(name in module._modules for name in names)), None)
    output = next((name for name in _OUTPUTS if name in module._modules), None)
    if projections is None or output is None or shape.key_dim != shape.value_dim:
        return None
    norms = None
    if module._modules.get("q_norm") is not None and module._modules.get("k_norm") is not None:
        norms = module.get_submodule("q_norm"), module.get_submodule("k_norm")
    parts = {*projections, output, *(("q_norm", "k_norm") if norms else ())}
    if lean_check.with_weights(module) - parts:
        return None
    qkv = stack([module.get_submodule(name) for name in projections], kernels.backend)
    out = stack([module.get_submodule(output)], kernels.backend)
    num_heads = shape.num_query_heads + 2 * shape.num_kv_heads
    if qkv is None or out is None or qkv.out_features != num_heads * shape.key_dim:
        return None
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    return LeanAttention(shape, layer_idx, (qkv, out), norms, scoring, kernels, rotates=rotates)


def finds_rotation(
    module: torch.nn.Module,
    call: ModuleCall,
    shapes: list[LayerShape],
    shape: LayerShape,
    kernels: RowKernels,
) -> bool | None:
    """Returns whether the replacement that computes the same rotates its heads; None if neither variant does."""
    tried = lean_check.wide_copy(module)
    hidden_states = random_rows(call.hidden_states.float())
    theirs = record(tried, call, hidden_states, shapes)
    for rotates in (True, False):
        if rotates and not _can_rotate(call, kernels):
            continue
        candidate = build(tried, shape, theirs.scoring, kernels, rotates=rotates)
        if candidate is None:
            return None
        try:
            ours = record(candidate, call, hidden_states, shapes)
        except (KernelArgumentError, RuntimeError):  # its shapes do not fit
            continue
        if agree(ours, theirs):
            return rotates
    return None


def build_in_place_of(
    module: torch.nn.Module,
    call: ModuleCall,
    shapes: list[LayerShape],
    shape: LayerShape,
    kernels: RowKernels,
    *,
    rotates: bool,
    checks: bool,
) -> LeanAttention | None:
    """Returns the replacement with the scoring that the module passes.

    checks: compares both in the model's own dtype, since a module may change dtypes internally, and returns None if
    they differ.
    """
    hidden_states = random_rows(call.hidden_states)
    own = lean_check.plain_copy(module, hidden_states.dtype) if checks else module
    theirs = record(own, call, hidden_states, shapes)
    replacement = build(module, shape, theirs.scoring, kernels, rotates=rotates)
    if checks and replacement is not None and not agree(record(replacement, call, hidden_states, shapes), theirs):
        return None
    return replacement


def _can_rotate(call: ModuleCall, kernels: RowKernels) -> bool:
    """Returns whether the module is called with cos and sin that the kernel accepts (olmo2's are always fp32)."""
    dtype = call.hidden_states.dtype
    embeddings = call.kwargs.get("position_embeddings", call.args[1] if len(call.args) > 1 else None)
    if not isinstance(embeddings, tuple) or len(embeddings) != 2:
        return False
    return all(
        isinstance(part, torch.Tensor)
        and part.ndim == 3
        and part.dtype == dtype
        and kernels.takes_rotation(part.shape[2], dtype)
        for part in embeddings
    )
