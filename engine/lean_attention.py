"""Attention modules as few calls: one linear for query, key and value, rotation in place, paged kernels, one linear.

What a layer hands to its attention function (scaling, window, softcap, sinks) is recorded from the model's own module;
none of it is worked out here. Not here: when modules are replaced (lean), and the arithmetic (kernels).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from engine import lean_check
from engine.attention import AttentionOps, PagedAttentionOp, PagedContext, attend, paged_attention_hook
from engine.batch import SessionRows, build_batch
from engine.lean_mlp import stack
from engine.paged_kv import LayerShape, PagedKVCache
from engine.row_invariant_modules import RowInvariantLinear
from engine.row_kernels import RowKernels
from kernels.errors import KernelArgumentError

_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_OUTPUTS = ("o_proj", "dense", "out_proj")
_NUM_ROWS = 5


@dataclass(frozen=True)
class ModuleCall:
    """How the decoder layer calls its attention module: taken from a forward of the whole model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def width(self) -> int:
        """Of the hidden states that the module reads."""
        hidden_states: torch.Tensor = self.kwargs["hidden_states"] if "hidden_states" in self.kwargs else self.args[0]
        return hidden_states.shape[-1]


@dataclass(frozen=True)
class Recorded:
    """What a module handed to its attention function (q, k, v and the constants), and what it returned."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    constants: dict[str, Any]
    output: Any


class LeanAttention(torch.nn.Module):
    """Stands in for a causal self-attention module without cache of its own."""

    def __init__(
        self,
        shape: LayerShape,
        layer_idx: int,
        linears: tuple[RowInvariantLinear, RowInvariantLinear],
        norms: tuple[torch.nn.Module, torch.nn.Module] | None,
        constants: dict[str, Any],
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
        self._constants = constants
        self._rotate = kernels.rotate

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        *_args: Any,
        paged: PagedContext,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, T, width] -> ([1, T, H], None), like the module it stands in for."""
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
            constants = {("s_aux" if name == "sinks" else name): value for name, value in self._constants.items()}
            attended = paged_attention_hook(self, first, second, third, None, paged=paged, **constants)[0][0]
        else:
            attended = attend(paged, self.layer_idx, (query, key, value), **self._constants)
        return self.out(attended.view(1, hidden_states.shape[1], -1)), None


def _normalise(norm: torch.nn.Module, heads: torch.Tensor) -> torch.Tensor:
    """Head by head where the norm's weight is one head wide (qwen3), else all heads of a row at once (olmo2)."""
    weight: torch.Tensor = norm.weight  # type: ignore[assignment]
    if weight.shape[-1] == heads.shape[2]:
        return norm(heads)  # type: ignore[no-any-return]
    return norm(heads.reshape(heads.shape[0], -1)).view(heads.shape)  # type: ignore[no-any-return]


def record(
    module: torch.nn.Module, call: ModuleCall, hidden_states: torch.Tensor, shapes: list[LayerShape]
) -> Recorded:
    """Run an attention module (a model's own or ours) on hidden_states [1, _NUM_ROWS, H], with recording kernels."""
    seen: dict[str, Any] = {}

    def write(key: torch.Tensor, value: torch.Tensor, *_caches: torch.Tensor) -> None:
        seen["key"], seen["value"] = key.clone(), value.clone()

    def attention(query: torch.Tensor, _keys: torch.Tensor, values: torch.Tensor, **others: Any) -> torch.Tensor:
        seen["query"], seen["others"] = query.clone(), others
        shape = (query.shape[0], query.shape[1], values.shape[3])
        generator = torch.Generator().manual_seed(23)
        return torch.randn(shape, generator=generator).to(query)

    dtype, device = hidden_states.dtype, hidden_states.device
    ops = AttentionOps("recording", cast(PagedAttentionOp, attention), write, lambda *_: None)
    batch = build_batch([SessionRows([0] * _NUM_ROWS, 0, [0], 1)], 2 * _NUM_ROWS, device)
    cache = PagedKVCache(shapes, num_blocks=1, block_size=2 * _NUM_ROWS, dtype=dtype, device=device, ops=ops)
    args, kwargs = _with_hidden_states(call, hidden_states)
    kwargs["paged"] = PagedContext(ops, batch, cache)
    output = module(*args, **kwargs)
    names = ("scaling", "sliding_window", "softcap", "sinks")
    constants = {name: seen["others"][name] for name in names}
    return Recorded((seen["query"], seen["key"], seen["value"]), constants, output)


def agree(ours: Recorded, theirs: Recorded) -> bool:
    """Whether two modules did the same."""
    mine, yours = ((run.tensors, run.output, tuple(run.constants.values())) for run in (ours, theirs))
    return lean_check.is_close(mine, yours)


def random_rows(width: int, like: torch.Tensor) -> torch.Tensor:
    """[1, _NUM_ROWS, width], of the dtype and on the device of `like`."""
    return torch.randn(1, _NUM_ROWS, width, generator=torch.Generator().manual_seed(17)).to(like)


def _with_hidden_states(call: ModuleCall, hidden_states: torch.Tensor) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the call with other hidden states, and everything floating in their dtype and length."""

    def fit(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim == 3:
            return value[:, : hidden_states.shape[1]].to(hidden_states.dtype)
        if isinstance(value, tuple):
            return tuple(fit(part) for part in value)
        return value

    args, kwargs = [fit(value) for value in call.args], {name: fit(value) for name, value in call.kwargs.items()}
    if "hidden_states" in kwargs:
        kwargs["hidden_states"] = hidden_states
    else:
        args[0] = hidden_states
    return args, kwargs


def build(
    module: torch.nn.Module, shape: LayerShape, constants: dict[str, Any], kernels: RowKernels, *, rotates: bool
) -> LeanAttention | None:
    """The stand-in if the module has the parts for one. Says nothing of what it computes."""
    projections = next((names for names in _PROJECTIONS if all(name in module._modules for name in names)), None)
    output = next((name for name in _OUTPUTS if name in module._modules), None)
    if projections is None or output is None or shape.key_dim != shape.value_dim:
        return None
    norms = None
    if module._modules.get("q_norm") is not None and module._modules.get("k_norm") is not None:
        norms = module.get_submodule("q_norm"), module.get_submodule("k_norm")
    parts = {*projections, output, *(("q_norm", "k_norm") if norms else ())}
    with_weights = {name for name, child in module.named_children() if list(child.parameters())}
    if with_weights - parts:
        return None
    qkv = stack([module.get_submodule(name) for name in projections], kernels.backend)
    out = stack([module.get_submodule(output)], kernels.backend)
    num_heads = shape.num_query_heads + 2 * shape.num_kv_heads
    if qkv is None or out is None or qkv.out_features != num_heads * shape.key_dim:
        return None
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    return LeanAttention(shape, layer_idx, (qkv, out), norms, constants, kernels, rotates=rotates)


def finds_rotation(
    module: torch.nn.Module,
    call: ModuleCall,
    shapes: list[LayerShape],
    shape: LayerShape,
    kernels: RowKernels,
) -> bool | None:
    """Whether the stand-in that computes what the module does rotates its heads; None where neither computes it."""
    tried = lean_check.wide_copy(module)
    hidden_states = random_rows(call.width, next(tried.parameters()))
    theirs = record(tried, call, hidden_states, shapes)
    for rotates in (True, False):
        if rotates and not _can_rotate(call, next(module.parameters()).dtype, kernels):
            continue
        candidate = build(tried, shape, theirs.constants, kernels, rotates=rotates)
        if candidate is None:
            return None
        try:
            ours = record(candidate, call, hidden_states, shapes)
        except (KernelArgumentError, RuntimeError):  # its shapes are not those of the stand-in
            continue
        if agree(ours, theirs):
            return rotates
    return None


def _can_rotate(call: ModuleCall, dtype: torch.dtype, kernels: RowKernels) -> bool:
    """Whether the module is called with cos and sin that the kernel takes (olmo2's are fp32, whatever the model's)."""
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
