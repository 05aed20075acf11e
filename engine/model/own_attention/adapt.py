"""Hands the queries, keys and values of such a model to paged attention, by the class of its attention module.

The projections, their order and the rotation stay the module's own; what it does with the scores is the kernel's. Runs
before everything else that replaces modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from outrider.engine.attention.layer import ATTENTION_NAME, paged_attention_hook
from outrider.engine.errors import ModelRefused
from outrider.engine.model.own_attention.alibi import add_positions
from outrider.engine.model.own_attention.passing_on import pass_on

# By model_type: classes that transformers does not mark as supporting other attention functions.
TYPES = frozenset({"biogpt", "bloom", "codegen", "falcon", "gpt_neo", "gptj", "mpt", "nemotron", "stablelm", "zamba2"})
# Transformers' modules are imported below by those that need them, which have been loaded by then.
# Two keys' biases differ by a head's slope.
_TWO_KEYS = torch.ones((1, 2), dtype=torch.long)


def adapt(path: str, model: Any) -> bool:
    """Adapts modules in place; returns whether the model is one of TYPES. Raises ModelRefused."""
    if model.config.model_type not in TYPES:
        return False
    modules = [module for module in model.modules() if type(module).__name__ in _ADAPTERS]
    for module in modules:
        kind = type(module).__name__
        try:
            _ADAPTERS[kind](module)
        except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ModelRefused(path, f"{kind} is not the module that is known here: {error}") from error
    pass_on(model, modules)
    if model.config.model_type != "mpt":  # which cannot do without a mask, and it is not used
        model.config._attn_implementation = ATTENTION_NAME
    return True


def caches_positions(config: Any) -> bool:
    """Returns whether the elements of a cached key are followed by its position."""
    return config.model_type in ("bloom", "mpt") or (config.model_type == "falcon" and bool(config.alibi))


def _attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **scoring: Any) -> torch.Tensor:
    """Attends query [1, Hq, T, D]; returns [1, T, Hq, Dv]. query and key may have more bits than value."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    attended: torch.Tensor = paged_attention_hook(module, query, key, value, None, paged=module.paged, **scoring)[0]
    return attended


def _give_paged(module: Any) -> None:
    """StableLM's and Nemotron's call the interface with what they are given, and their layers keep `paged`."""

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"paged": module.paged}

    module.register_forward_pre_hook(before, with_kwargs=True)


def _take_scores(module: Any) -> None:
    """GPT-J, CodeGen and GPT-Neo have a method for what follows the projections."""
    scoring: dict[str, Any] = {"scaling": 1.0 / getattr(module, "scale_attn", 1.0)}
    if getattr(module, "attention_type", None) == "local":
        scoring["sliding_window"] = int(module.config.window_size)
    if hasattr(module, "layer_id"):
        module.layer_idx = module.layer_id
    module._attn = functools.partial(_in_place_of_scores, module, scoring)


def _in_place_of_scores(
    module: Any,
    scoring: dict[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None = None,
) -> tuple[torch.Tensor, None]:
    return _attend(module, query, key, value, **scoring).transpose(1, 2), None


def _adapt_falcon(module: Any) -> None:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    slopes = _slopes(build_alibi_tensor(_TWO_KEYS, module.num_heads, torch.float32)) if module.config.alibi else None
    module.forward = functools.partial(_falcon, module, slopes)


def _falcon(
    module: Any,
    slopes: torch.Tensor | None,
    hidden_states: torch.Tensor,
    *,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **_other: Any,
) -> tuple[torch.Tensor, None]:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    query, key, value = (part.transpose(1, 2) for part in module._split_heads(module.query_key_value(hidden_states)))
    copies = key.shape[1] // module.num_kv_heads  # of each key, in the newer layout
    key, value = key[:, ::copies], value[:, ::copies]
    if slopes is None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        query, key = add_positions(module.paged, query, key, slopes)
    attended = _attend(module, query, key, value, scaling=module.inv_norm_factor)
    return module.dense(attended.flatten(2)), None


def _adapt_bloom(module: Any) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    slopes = _slopes(build_alibi_tensor(_TWO_KEYS, module.num_heads, torch.float32)) / module.inv_norm_factor
    module.forward = functools.partial(_bloom, module, slopes)


def _bloom(
    module: Any, slopes: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor, **_other: Any
) -> tuple[torch.Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    query, key = add_positions(module.paged, query, key, slopes)
    attended = _attend(module, query, key, value, scaling=module.inv_norm_factor)
    return module.dense(attended.flatten(2)) + residual, None


def _adapt_mpt(module: Any) -> None:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    if module.n_heads * module.head_dim != module.hidden_size:
        raise ValueError(f"{module.n_heads} heads in a width of {module.hidden_size}")
    slopes = _slopes(build_mpt_alibi_tensor(module.n_heads, 2)) / module.softmax_scale
    module.forward = functools.partial(_mpt, module, slopes)


def _mpt(module: Any, slopes: torch.Tensor, hidden_states: torch.Tensor, **_other: Any) -> tuple[torch.Tensor, None]:
    projected = module.Wqkv(hidden_states)
    if module.clip_qkv:
        projected = projected.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = projected.unflatten(2, (3, module.n_heads, module.head_dim)).permute(2, 0, 3, 1, 4)
    query, key = add_positions(module.paged, query, key, slopes)
    attended = _attend(module, query, key, value, scaling=module.softmax_scale)
    return module.out_proj(attended.flatten(2)), None


def _drop_biases(body: Any) -> None:
    """MPT's body makes biases of its longest context in every forward."""
    body.build_mpt_alibi_tensor = _no_biases


def _no_biases(*_sizes: Any, **_options: Any) -> None:
    return None


def _slopes(biases: torch.Tensor) -> torch.Tensor:
    """Returns the heads' slopes [H] of biases [H, 1, 2]."""
    return biases[:, 0, 1] - biases[:, 0, 0]


def _number_attention(layer: Any) -> None:
    """Zamba2's attention modules, which share their weights, are not numbered."""
    layer.shared_transformer.self_attn.layer_idx = layer.mamba_decoder.layer_idx


def _fuse_bias(linear: Any) -> None:
    """Falcon's linear rounds before it adds the bias."""
    linear.__class__ = torch.nn.Linear


_ADAPTERS: dict[str, Callable[[Any], None]] = {
    "StableLmAttention": _give_paged,
    "NemotronAttention": _give_paged,
    "GPTJAttention": _take_scores,
    "CodeGenAttention": _take_scores,
    "GPTNeoSelfAttention": _take_scores,
    "FalconAttention": _adapt_falcon,
    "FalconLinear": _fuse_bias,
    "BloomAttention": _adapt_bloom,
    "MptAttention": _adapt_mpt,
    "MptModel": _drop_biases,
    "Zamba2HybridLayer": _number_attention,
}
