"""Our attention behind transformers' attention hook: the model code is theirs, keys and values are ours.

Not here: the kernels (kernels/paged_attention, kernels/kv_write) and the model code (transformers).
A model loaded with `attn_implementation=ATTENTION_NAME` calls `paged_attention_hook` once per layer; whatever
is given to `model(..., paged=PagedContext(...))` reaches it as a keyword argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import AttentionInterface

from engine.errors import BackendUnavailable, EngineError
from engine.paged_kv import LayerShape

if TYPE_CHECKING:
    from engine.batch import ForwardBatch
    from engine.paged_kv import PagedKVCache

# transformers gives names special meanings: no "flash", "sdpa", "flex_attention", "paged|", "org/name".
ATTENTION_NAME = "outrider_paged"
ATTENTION_BACKENDS = ("auto", "cpu", "reference", "triton")

# Arguments that models hand to every attention function and that do not change what ours computes.
_HARMLESS_ARGUMENTS = frozenset(
    {
        "cache_position",
        "dropout",
        "head_mask",
        "is_causal",
        "layer_type",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class PagedAttentionOp(Protocol):
    """kernels/paged_attention: query [T, Hq, D] against the paged cache, returns [T, Hq, Dv]."""

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        *,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        query_starts: torch.Tensor,
        tree_starts: torch.Tensor,
        parents: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class AttentionOps:
    """The three kernels of one backend."""

    backend: str
    paged_attention: PagedAttentionOp
    kv_write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    kv_move: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    takes_plans: bool = False  # paged_attention has a keyword `plans` (see kernels/paged_attention/cpu)

    @property
    def row_backend(self) -> str:
        """Whose linears, norms, gates and rotations go with it: "triton" or "cpu" (row_kernels)."""
        return "triton" if self.backend == "triton" else "cpu"


def resolve_attention_ops(backend: str, device: torch.device) -> AttentionOps:
    """The kernels for a backend name out of ATTENTION_BACKENDS; "auto" is the fastest that runs on the device.

    Raises BackendUnavailable, which lists what there is.
    """
    if backend not in ATTENTION_BACKENDS:
        raise BackendUnavailable(f"attention_backend={backend!r}: choose one of {', '.join(ATTENTION_BACKENDS)}")
    if backend == "auto":
        backend = "cpu" if device.type == "cpu" else "triton"
    if backend == "cpu" and device.type != "cpu":
        raise BackendUnavailable(f"attention_backend='cpu' on {device.type}: use 'triton' or 'auto'")
    # Imported here: numba and triton take a moment to import, and not every backend needs them.
    if backend == "triton":
        return _triton_ops(device)
    if backend == "reference":
        from kernels.kv_write import reference as write_kernels
        from kernels.paged_attention import reference as attention_kernels

        return AttentionOps(
            "reference",
            attention_kernels.paged_attention,
            write_kernels.kv_write,
            write_kernels.kv_move,
        )
    from kernels.kv_write.cpu import kv_move, kv_write
    from kernels.paged_attention.cpu import paged_attention

    return AttentionOps(
        "cpu",
        paged_attention,
        kv_write,
        kv_move,
        takes_plans=True,
    )


def _triton_ops(device: torch.device) -> AttentionOps:
    try:
        from triton import knobs
    except ImportError as error:
        fix = "install the extra 'gpu', or use device='cpu' with attention_backend='cpu'"
        raise BackendUnavailable(f"attention_backend='triton': {error}; {fix}") from error
    if device.type == "cpu" and not knobs.runtime.interpret:
        raise BackendUnavailable(
            "attention_backend='triton' on cpu: use 'cpu' (TRITON_INTERPRET=1 runs the triton kernels there, for tests)"
        )
    from kernels.kv_write.triton import kv_move, kv_write
    from kernels.paged_attention.triton import paged_attention

    return AttentionOps("triton", paged_attention, kv_write, kv_move)


class UnsupportedAttention(EngineError):
    """A model asks of its attention function what the paged kernels do not compute."""


@dataclass
class AttentionProbe:
    """Stands in for the cache in the probe forward: records what each layer's hook call looks like."""

    module_names: dict[int, str]  # id(module) -> name
    layers: dict[int, LayerShape] = field(default_factory=dict)
    num_calls: int = 0

    def record(
        self,
        module: torch.nn.Module,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        sliding_window: int | None,
        other_arguments: dict[str, Any],
    ) -> torch.Tensor:
        """Check and note one hook call; returns zeros of the output's shape [1, T, Hq, Dv]."""
        query, key, value = tensors
        name = self.module_names.get(id(module), type(module).__name__)
        unknown = sorted(
            argument
            for argument, given in other_arguments.items()
            if given is not None and argument not in _HARMLESS_ARGUMENTS
        )
        if unknown:
            raise UnsupportedAttention(f"{name} passes {', '.join(unknown)} to its attention function")
        if attention_mask is not None:
            raise UnsupportedAttention(f"{name} passes a mask or bias of its own to its attention function")
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedAttention(f"{name} is not causal")
        layer_idx = getattr(module, "layer_idx", None)
        if not isinstance(layer_idx, int):
            raise UnsupportedAttention(f"{name} has no layer_idx")
        if query.ndim != 4 or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
            raise UnsupportedAttention(f"{name} attends with query {list(query.shape)}, key {list(key.shape)}")
        self.num_calls += 1
        self.layers[layer_idx] = LayerShape(
            name, query.shape[1], key.shape[1], key.shape[3], value.shape[3], sliding_window
        )
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))


@dataclass(frozen=True)
class PagedContext:
    """What a forward carries to every layer's hook. The probe forward has a probe and neither batch nor cache."""

    ops: AttentionOps
    batch: ForwardBatch | None = None
    cache: PagedKVCache | None = None
    probe: AttentionProbe | None = None
    plans: dict[Any, Any] = field(default_factory=dict)  # what the attention kernel keeps between layers


def paged_attention_hook(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: PagedContext,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **other_arguments: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D], rotated; returns ([1, T, Hq, Dv], None).

    `scaling` and `paged` have no default on purpose: a model that does not forward its keyword arguments must
    fail, not compute something else.
    """
    if paged.probe is not None:
        shape = (query, key, value)
        return paged.probe.record(module, shape, attention_mask, sliding_window, other_arguments), None
    attended = attend(
        paged,
        int(module.layer_idx),  # type: ignore[arg-type]
        (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)),
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return attended[None], None


def attend(
    paged: PagedContext,
    layer_idx: int,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Write key [T, Hkv, D] and value [T, Hkv, Dv], then attend query [T, Hq, D]; returns [T, Hq, Dv]."""
    batch, cache = paged.batch, paged.cache
    if batch is None or cache is None:
        raise EngineError("a paged forward needs a batch and a cache")
    query, key, value = tensors
    key_cache, value_cache = cache.layers[layer_idx]
    paged.ops.kv_write(key, value, key_cache, value_cache, batch.slot_mapping)
    attention: Callable[..., torch.Tensor] = paged.ops.paged_attention
    plans = {"plans": paged.plans} if paged.ops.takes_plans else {}
    return attention(
        query,
        key_cache,
        value_cache,
        block_tables=batch.block_tables,
        context_lens=batch.context_lens,
        query_starts=batch.query_starts,
        tree_starts=batch.tree_starts,
        parents=batch.parents,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        **plans,
    )


def register_attention() -> None:
    """Make ATTENTION_NAME known to transformers. Safe to call again. No mask is registered: causality, windows
    and trees are the kernel's, and an unknown name makes transformers skip its own masks."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_hook)
