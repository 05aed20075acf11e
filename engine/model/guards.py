"""Refuses checkpoints that would load and be silently wrong.

Each rule comes from a case with wrong logits, or follows from transformers' code; docs/architectures.md lists what they
refuse. Not here: loading (load).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig

from outrider.engine.attention.layer import AttentionProbe, PagedContext, UnsupportedAttention
from outrider.engine.attention.ops import AttentionOps, LayerShape
from outrider.engine.attention.paged_kv import CODE_DTYPES
from outrider.engine.errors import ModelRefused
from outrider.engine.model import text_part
from outrider.engine.model.own_attention import adapt as own_attention
from outrider.engine.model.sparse_indexer import INDEXED
from outrider.engine.model.weight_files import stored_tensors
from outrider.engine.recurrent.states import RecurrentShape
from outrider.shared.checkpoint.file_names import linked_parts, weight_files
from outrider.shared.checkpoint.json_file import read_object
from outrider.shared.checkpoint.quantization import read_quantization, require_readable
from outrider.shared.errors import ConfigError
from outrider.shared.vllm_keys import KV_CACHE_DTYPES

logger = logging.getLogger(__name__)

# Maps vLLM's names to the dtype that the model computes in. No kernel computes in float16.
_SERVED_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float32,
    "half": torch.float32,
}
_PROBE_NUM_TOKENS = 3
# Kinds of layers, as in config.json.
_SIZES_IN_CONFIG = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_ATTENTION_LAYERS = frozenset({"full_attention", *_SIZES_IN_CONFIG})
_SPARSE_LAYERS = frozenset(
    {"indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse"}
)
_WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "mlp", "moe"})
# Models whose recurrent modules are replaced by our mixers (recurrent/adapt); transformers' flag does not apply to
# them.
_LINEAR = frozenset({"linear_attention"})
_OTHER_LAYERS = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _LINEAR),
    **dict.fromkeys(("bamba", "bailing_hybrid", "granitemoehybrid", "olmo_hybrid", "kimi_linear", "jamba"), _LINEAR),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _LINEAR),  # without attention
    "nemotron_h": _LINEAR | {"mlp", "moe"},  # an MLP is a layer of its own
    "falcon_h1": frozenset({"hybrid"}),  # attention and a recurrent module side by side
    "zamba2": _LINEAR | {"hybrid"},  # one after the other
    **dict.fromkeys(("lfm2", "lfm2_moe"), frozenset({"conv"})),
}
# Names of the number of layers, and layers; a hundred times the deepest published model.
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_MOST_LAYERS = 20_000
_SERVE_ANOTHER_ARCHITECTURE = "serve one of the architectures that docs/architectures.md lists as served"
_SERVE_UNQUANTISED = "serve the bfloat16 or float32 checkpoint that it was made from"
# Endings of tensors that belong to packed weights, in every known format.
_PACKED_NAME = re.compile(
    r"(scales?|scale_inv|scale_2|global_scale|absmax|quant_map|SCB|zero_point|zeros|qweight|packed|g_idx|blocks)$"
)


def read_config(path: str) -> Any:
    """Reads the checkpoint's config; refuses checkpoints with their own code or quantised weights that are not read."""
    try:
        fields = read_object(Path(path) / "config.json")
        _require_sane_depth(fields)
        known = text_part.READ_AS.get(str(fields.get("model_type")))
        if known is not None:
            config = CONFIG_MAPPING[known].from_dict(fields | {"model_type": known})
        else:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ConfigError, OSError, ValueError, KeyError, TypeError, ArithmeticError, StrictDataclassError) as error:
        raise ModelRefused(
            path,
            f"its config cannot be read: {error}",
            "give a directory (or hub id) with the config.json of an architecture built into transformers",
        ) from error
    _require_readable_weights(path)
    return config


def _require_sane_depth(fields: dict[str, Any]) -> None:
    """Raises ValueError for a number of layers of which transformers' config would build a list for seconds."""
    inner = fields.get("text_config")
    for part in (fields, inner if isinstance(inner, dict) else {}):
        for name in _DEPTHS:
            depth = part.get(name)
            if isinstance(depth, int) and depth > _MOST_LAYERS:
                raise ValueError(f"{name} is {depth}, above {_MOST_LAYERS}")


def _require_readable_weights(path: str) -> None:
    """Refuses quantised weights that are not read: transformers would load them as something else, or not at all."""
    try:
        require_readable(Path(path))
    except ConfigError as error:
        raise ModelRefused(path, error.message, _SERVE_UNQUANTISED) from error


def require_weight_files(path: str) -> None:
    """Refuses a folder without weights, before anything is read."""
    if linked_parts(Path(path)):
        return
    try:
        weight_files(Path(path))
    except ConfigError as error:
        raise ModelRefused(path, error.message) from error


def require_layers(path: str, config: Any, num_weights: int) -> None:
    """Refuses a number of layers that the files cannot have: building as many would take hours."""
    count = config.get_text_config().num_hidden_layers
    if not 1 <= count <= num_weights:
        cause = f"num_hidden_layers of its config.json is {count}, and its files have {num_weights} weights"
        raise ModelRefused(path, cause)


def resolve_dtype(path: str, config: Any, requested: str) -> torch.dtype:
    """Returns the dtype that the model computes in.

    "auto" follows the weights: a quantised checkpoint is dequantised to bfloat16, unless its other weights are float32.
    float16 is computed in float32, which is lossless.
    """
    if requested != "auto":
        if requested not in _SERVED_DTYPES:
            choices = ", ".join(("auto", *_SERVED_DTYPES))
            raise ModelRefused(path, f"dtype={requested!r} is not served", f"choose one of {choices}")
        return _SERVED_DTYPES[requested]
    if read_quantization(Path(path)) is not None:
        return torch.float32 if str(getattr(config, "dtype", None)) == "torch.float32" else torch.bfloat16
    name = _stored_dtype(path, config)
    if name is None:
        raise ModelRefused(path, "neither its config nor its weights give a dtype", "set dtype")
    if name not in _SERVED_DTYPES:
        cause = f"its weights are {name}, which the kernels do not compute in"
        raise ModelRefused(path, cause, 'set dtype="bfloat16" or dtype="float32"')
    return _SERVED_DTYPES[name]


def resolve_kv_codes(path: str, config: Any, requested: str) -> torch.dtype | None:
    """Returns the dtype of the KV cache's codes; None for a cache in the model's dtype. Needs no weights."""
    if requested not in KV_CACHE_DTYPES:
        choices = ", ".join(KV_CACHE_DTYPES)
        raise ModelRefused(path, f"kv_cache_dtype={requested!r} is not served", f"choose one of {choices}")
    if KV_CACHE_DTYPES[requested] == "auto":
        return None
    text_config = config.get_text_config()
    latents = "latents" if getattr(text_config, "kv_lora_rank", None) else ""
    latents = latents or ("the positions of keys" if own_attention.caches_positions(text_config) else "")
    if latents or INDEXED.get(text_config.model_type) in (getattr(text_config, "layer_types", None) or ()):
        cause = f"its attention caches {latents or 'keys of an indexer'}, which are kept in the model's dtype"
        logger.warning("%s: kv_cache_dtype=%s is taken as auto: %s", path, requested, cause)
        return None
    return CODE_DTYPES[KV_CACHE_DTYPES[requested]]


def rounds_to_float16(requested: str) -> bool:
    """Returns whether this dtype rounds weights to float16 before they are computed with in float32."""
    return requested in ("float16", "half")


def describe_rounding(path: str, config: Any, requested: str) -> str | None:
    """Describes for the log how quantised or float16 weights are rounded; None for all others."""
    quantization = read_quantization(Path(path))
    if quantization is not None:
        name = str(resolve_dtype(path, config, requested)).removeprefix("torch.")
        return f"its weights are quantised ({quantization.method}): computed in {name}"
    if _stored_dtype(path, config) != "float16":
        return None
    if resolve_dtype(path, config, requested) == torch.bfloat16:
        return "its weights are float16: rounded from 11 significant bits to bfloat16's 8; dtype=float16 keeps them"
    return (
        "its weights are float16: kept to the bit, computed in float32, in twice the memory; "
        "dtype=bfloat16 takes half of that and rounds them from 11 significant bits to 8"
    )


def _stored_dtype(path: str, config: Any) -> str | None:
    stored = getattr(config, "dtype", None)
    if stored is None:
        stored = next((tensor.read().dtype for tensor in stored_tensors(Path(path)).values()), None)
    return None if stored is None else str(stored).removeprefix("torch.")


def require_supported_architecture(path: str, config: Any) -> None:
    """Guard 1: the model class must route its attention through transformers' interface.

    bloom and codegen accept any attention name, never call it and return wrong logits (off by about 4).
    """
    model_class = text_part.model_class(config)
    if model_class is None:
        is_multimodal = config.get_text_config(decoder=True) is not config
        why = "is multimodal, and its text part is not served" if is_multimodal else "is not a causal language model"
        raise ModelRefused(path, f"model type {config.model_type!r} {why}", _SERVE_ANOTHER_ARCHITECTURE)
    if any(getattr(part, "is_encoder_decoder", False) for part in (config, config.get_text_config(decoder=True))):
        raise ModelRefused(path, f"{model_class.__name__} is an encoder-decoder model")
    is_adapted = is_hybrid(config) or config.model_type in own_attention.TYPES
    if not model_class._supports_attention_backend and not is_adapted:
        raise ModelRefused(
            path,
            f"{model_class.__name__} does not route its attention through transformers' attention interface",
            _SERVE_ANOTHER_ARCHITECTURE,
        )
    _require_known_layers(path, config)


def _require_known_layers(path: str, config: Any) -> None:
    """Requires that config.json lists no kind of layer that is not computed here."""
    text_config = config.get_text_config()
    known = _ATTENTION_LAYERS | _OTHER_LAYERS.get(text_config.model_type, frozenset())
    known |= {INDEXED.get(text_config.model_type, "")}
    unknown = sorted(set(getattr(text_config, "layer_types", None) or ()) - known)
    sparse = [kind for kind in unknown if kind in _SPARSE_LAYERS]
    if sparse:
        cause = f"its layers of type {', '.join(sparse)} choose which tokens each token attends (sparse attention)"
        raise ModelRefused(path, cause, _SERVE_ANOTHER_ARCHITECTURE)
    if unknown:
        raise ModelRefused(path, f"it has layers of type {', '.join(unknown)}", _SERVE_ANOTHER_ARCHITECTURE)


def resolve_max_model_len(path: str, config: Any, requested: int | None) -> int:
    """Returns the longest sequence (prompt + output) that this checkpoint may serve, in tokens.

    Guard 5: with longrope and dynamic RoPE the frequencies of all rows of a forward depend on its longest position (a
    short request's logits moved by 2.5 next to a long one). longrope has one regime up to its original length and is
    served up to there; dynamic is refused.
    """
    text_config = config.get_text_config()
    longest = _first_int(text_config, ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"))
    limit, cause = longest, "its max_position_embeddings"
    for rope in _rope_parameters(text_config):
        rope_type = str(rope.get("rope_type", rope.get("type", "default")))
        if "dynamic" in rope_type:
            raise ModelRefused(
                path,
                f"rope_type {rope_type!r} picks its frequencies from the longest position of the whole batch",
                'set a static rope_type ("linear", "yarn", "llama3") in config.json, or serve another model',
            )
        if rope_type == "longrope":
            original = rope.get("original_max_position_embeddings") or getattr(
                text_config, "original_max_position_embeddings", None
            )
            if original is None:
                raise ModelRefused(path, "longrope without original_max_position_embeddings")
            if limit is None or int(original) < limit:
                limit, cause = int(original), "the original length of its longrope (beyond it the batch decides)"
    if limit is None and requested is None:
        raise ModelRefused(path, "its config does not give a maximum context length", "set max_model_len")
    if requested is not None and limit is not None and requested > limit:
        raise ModelRefused(path, f"max_model_len={requested} is above {cause}, {limit}", f"use at most {limit}")
    resolved = requested if requested is not None else limit
    if resolved is None or resolved < 2:
        raise ModelRefused(path, f"max_model_len={resolved} leaves no room for a prompt and a token")
    return resolved


def _first_int(config: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return None


def _rope_parameters(text_config: Any) -> list[dict[str, Any]]:
    """Returns all RoPE settings of a model: one dict, or one per layer type (gemma3)."""
    found: list[dict[str, Any]] = []
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(text_config, name, None)
        if isinstance(parameters, dict):
            nested = [entry for entry in parameters.values() if isinstance(entry, dict)]
            found.extend(nested or [parameters])
    return found


def require_windows(path: str, config: Any, layer_shapes: list[LayerShape], max_model_len: int) -> None:
    """Requires that the hook gets every sliding window and chunk size.

    Some models (phimoe) put theirs only into the mask, which is not used. One of at least max_model_len does not
    matter.
    """
    text_config = config.get_text_config()
    layer_types = getattr(text_config, "layer_types", None)
    attention_types = [kind for kind in layer_types or () if kind not in _WITHOUT_ATTENTION]
    for index, shape in enumerate(layer_shapes):
        kind = "sliding_attention" if layer_types is None else attention_types[index]
        size = getattr(text_config, _SIZES_IN_CONFIG.get(kind, ""), None)
        passed = shape.sliding_window if kind == "sliding_attention" else shape.chunk_size
        if isinstance(size, int) and size < max_model_len and passed != size:
            limit = f"a window of {passed}" if kind == "sliding_attention" else f"chunks of {passed}"
            cause = f"{shape.module_name} passes its attention function {limit}, its config says {size}"
            raise ModelRefused(path, cause, f"set max_model_len={size} or less")


def is_hybrid(config: Any) -> bool:
    """Returns whether some of its layers are recurrent."""
    return config.get_text_config().model_type in _OTHER_LAYERS


def attention_layers(config: Any) -> list[int]:
    """Returns the numbers of the layers that must attend; the others are recurrent."""
    text_config = config.get_text_config()
    layers = range(int(text_config.num_hidden_layers))
    if not is_hybrid(config):
        return list(layers)
    return [layer for layer in layers if text_config.layer_types[layer] not in _WITHOUT_ATTENTION]


def require_all_weights(path: str, loading_info: dict[str, Any]) -> None:
    """Refuses missing weights, which transformers fills with random numbers, and scales that nothing reads.

    transformers only warns of both.
    """
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        names = loading_info.get(kind)
        if names:
            shown = json.dumps(sorted(str(name) for name in names)[:5])
            raise ModelRefused(path, f"its weights do not fit its config: {kind} {shown}")
    scales = sorted(name for name in loading_info.get("unexpected_keys") or () if _PACKED_NAME.search(name))
    if scales:
        cause = f"it has tensors of quantised weights that its config does not explain: {json.dumps(scales[:5])}"
        raise ModelRefused(path, cause, _SERVE_UNQUANTISED)


def require_all_used(path: str, loading_info: dict[str, Any]) -> None:
    """Refuses weights that the model does not have, of which transformers only warns: their effect would be lost."""
    names = sorted(loading_info.get("unexpected_keys") or ())
    if names:
        cause = f"it has weights that would be {json.dumps(names[:5])}, which the model does not have"
        raise ModelRefused(path, cause, "serve the checkpoint that it was made from, as a folder")


@torch.inference_mode()
def probe_layers(
    path: str,
    model: torch.nn.Module,
    ops: AttentionOps,
    attention_layers: Sequence[int],
    recurrent_shapes: Sequence[RecurrentShape] = (),
) -> list[LayerShape]:
    """Runs a three-token forward whose hook only records; returns the LayerShape of every layer that attends.

    Guards 1, 2 and 7: each of attention_layers, a layer_idx, must call the hook exactly once and pass `scaling` and
    `paged` (stablelm does not); each recurrent mixer must be called once. Head counts come from tensor shapes, not from
    attribute names.
    """
    probe = AttentionProbe({id(module): name for name, module in model.named_modules()})
    device = next(model.parameters()).device
    token_ids = torch.zeros((1, _PROBE_NUM_TOKENS), dtype=torch.long, device=device)
    positions = torch.arange(_PROBE_NUM_TOKENS, device=device)
    try:
        output = model(
            token_ids,
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=positions[-1:],
            paged=PagedContext(ops, probe=probe),
        )
    except (UnsupportedAttention, TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        cause = f"{type(model).__name__} does not work with a paged attention function: {error}"
        raise ModelRefused(path, cause, _SERVE_ANOTHER_ARCHITECTURE) from error
    if probe.num_calls != len(attention_layers) or sorted(probe.layers) != list(attention_layers):
        cause = f"{type(model).__name__} called the attention function {probe.num_calls} times"
        raise ModelRefused(path, f"{cause} in a forward of {len(attention_layers)} layers", _SERVE_ANOTHER_ARCHITECTURE)
    if probe.mixers != list(recurrent_shapes):
        cause = f"{type(model).__name__} called {len(probe.mixers)} recurrent layers"
        raise ModelRefused(path, f"{cause} in a forward of {len(recurrent_shapes)}", _SERVE_ANOTHER_ARCHITECTURE)
    if output.logits.shape[1] != 1:
        raise ModelRefused(path, f"{type(model).__name__} ignores logits_to_keep", _SERVE_ANOTHER_ARCHITECTURE)
    return [probe.layers[layer] for layer in attention_layers]


def number_attention_layers(model: torch.nn.Module, layer_shapes: Sequence[LayerShape]) -> None:
    """Numbers the attention modules' layer_idx 0 to m - 1: their index in the KV cache, which has no recurrent layers.

    Without a cache of transformers', nothing else reads layer_idx.
    """
    for index, shape in enumerate(layer_shapes):
        module: Any = model.get_submodule(shape.module_name)
        module.layer_idx = index
