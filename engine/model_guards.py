"""Which checkpoints the engine refuses, and why: everything that would otherwise load and be silently wrong.

Not here: loading (model). The rules were each observed to produce wrong logits, or read in transformers; see
docs/architecture.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from engine.attention import AttentionOps, AttentionProbe, PagedContext, UnsupportedAttention
from engine.errors import ModelRefused
from engine.paged_kv import LayerShape

_SERVED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PROBE_NUM_TOKENS = 3


def read_config(path: str) -> Any:
    """The checkpoint's config; refuses code shipped with the checkpoint and quantised weights."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelRefused(
            path,
            f"its config cannot be read: {error}",
            "name a directory (or hub id) with the config.json of an architecture that transformers itself knows",
        ) from error
    require_plain_weights(path, config)
    return config


def require_plain_weights(path: str, config: Any) -> None:
    """Refuse quantised weights by their method's name: transformers gives them linears of its own, whose packed weights
    the row-invariant linears cannot read."""
    for source in (config, config.get_text_config()):
        settings = getattr(source, "quantization_config", None)
        if settings is not None:
            method = settings.get("quant_method", "method not named")
            raise ModelRefused(
                path,
                f"its weights are quantised ({method}), and only plain ones are served",
                "serve the bfloat16 or float32 checkpoint that it was made from",
            )


def require_safetensors(path: str) -> None:
    """Refuse a local directory without safetensors (a pickle can run code when it is read)."""
    directory = Path(path)
    if directory.is_dir() and not any(directory.glob("*.safetensors")):
        raise ModelRefused(
            path,
            "there is no *.safetensors file in it",
            "convert the checkpoint: AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path)",
        )


def resolve_dtype(path: str, config: Any, requested: str) -> torch.dtype:
    """ "auto" is the checkpoint's own dtype; only float32 and bfloat16 are served."""
    if requested != "auto":
        if requested not in _SERVED_DTYPES:
            choices = ", ".join(("auto", *_SERVED_DTYPES))
            raise ModelRefused(path, f"dtype={requested!r} is not served", f"choose one of {choices}")
        return _SERVED_DTYPES[requested]
    stored = getattr(config, "dtype", None) or _dtype_of_weights(path)
    name = str(stored).removeprefix("torch.")
    if name not in _SERVED_DTYPES:
        raise ModelRefused(
            path,
            f"its weights are {name}, which the kernels do not compute in",
            'ask for dtype="bfloat16" (same size, fewer mantissa bits) or dtype="float32" (nothing lost)',
        )
    return _SERVED_DTYPES[name]


def _dtype_of_weights(path: str) -> torch.dtype:
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (a safetensors handle is not a dict)
                return tensors.get_tensor(name).dtype  # type: ignore[no-any-return]
    raise ModelRefused(path, "neither its config nor its weights tell the dtype", "give the dtype by name")


def read_eos_token_ids(path: str, config: Any) -> tuple[int, ...]:
    """End-of-sequence ids: the generation config's, else the config's; () if neither names one."""
    try:
        generation_config: Any = GenerationConfig.from_pretrained(path)
    except (OSError, ValueError):
        generation_config = None
    for source in (generation_config, config.get_text_config()):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
    return ()


def require_supported_architecture(path: str, config: Any) -> None:
    """Guard 1: the model class must route its attention through transformers' interface.

    bloom and codegen accept any attention name, never call it and return wrong logits (off by about 4).
    """
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise ModelRefused(path, f"model type {config.model_type!r} is not a causal language model")
    model_class = mapping[type(config)]
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(path, f"{model_class.__name__} is an encoder-decoder model")
    if not model_class._supports_attention_backend:
        raise ModelRefused(
            path,
            f"{model_class.__name__} does not route its attention through transformers' attention interface",
            "serve a model whose class sets _supports_attention_backend (llama, qwen, mistral, gemma, gpt2, ...)",
        )


def resolve_max_model_len(path: str, config: Any, requested: int | None) -> int:
    """The longest sequence (prompt + output) that this checkpoint may serve.

    Guard 5: with longrope and dynamic RoPE the frequencies of all rows of a forward depend on the longest
    position in it (a short request's logits moved by 2.5 beside a long one). longrope has one regime up to
    its original length, so it is served up to there; dynamic is refused.
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
        raise ModelRefused(path, "its config does not tell the longest context", "give max_model_len")
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
    """All RoPE settings of a model: one dict, or one per layer type (gemma3)."""
    found: list[dict[str, Any]] = []
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(text_config, name, None)
        if isinstance(parameters, dict):
            nested = [entry for entry in parameters.values() if isinstance(entry, dict)]
            found.extend(nested or [parameters])
    return found


def require_windows(path: str, config: Any, layer_shapes: list[LayerShape], max_model_len: int) -> None:
    """The hook must be told of every sliding window: some models (phimoe) put theirs into the mask alone, which
    is not ours. A window that no sequence can outgrow does not matter."""
    text_config = config.get_text_config()
    layer_types = getattr(text_config, "layer_types", None)
    unknown = sorted(set(layer_types or ()) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelRefused(path, f"it has layers of type {', '.join(unknown)}", "serve another model")
    window = getattr(text_config, "sliding_window", None)
    if not isinstance(window, int) or window >= max_model_len:
        return
    for index, shape in enumerate(layer_shapes):
        slides = layer_types is None or layer_types[index] == "sliding_attention"
        if slides and shape.sliding_window != window:
            told = f"tells its attention function of a window of {shape.sliding_window}"
            cause = f"{shape.module_name} {told}, its config says {window}"
            raise ModelRefused(path, cause, f"give max_model_len={window} or less")


def require_all_weights(path: str, loading_info: dict[str, Any]) -> None:
    """transformers fills missing weights with random numbers and only warns."""
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        names = loading_info.get(kind)
        if names:
            shown = json.dumps(sorted(str(name) for name in names)[:5])
            raise ModelRefused(path, f"its weights do not fit its config: {kind} {shown}")


@torch.inference_mode()
def probe_layers(path: str, model: torch.nn.Module, ops: AttentionOps, num_layers: int) -> list[LayerShape]:
    """Run a three-token forward whose hook only records; returns one LayerShape per layer.

    Guards 1, 2 and 7: every layer must call the hook exactly once and hand over `scaling` and `paged`
    (stablelm does not forward its arguments); head counts come from tensor shapes, not from attribute names.
    """
    probe = AttentionProbe({id(module): name for name, module in model.named_modules()})
    device = next(model.parameters()).device
    token_ids = torch.zeros((1, _PROBE_NUM_TOKENS), dtype=torch.long, device=device)
    positions = torch.arange(_PROBE_NUM_TOKENS, device=device)
    fix = "this architecture cannot be served; see the list in docs/architecture.md"
    try:
        output = model(
            token_ids,
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=positions[-1:],
            paged=PagedContext(ops, probe=probe),
        )
    except (UnsupportedAttention, TypeError, LookupError, AttributeError, RuntimeError) as error:
        cause = f"{type(model).__name__} does not work with a paged attention function: {error}"
        raise ModelRefused(path, cause, fix) from error
    if probe.num_calls != num_layers or sorted(probe.layers) != list(range(num_layers)):
        cause = f"{type(model).__name__} called the attention function {probe.num_calls} times"
        raise ModelRefused(path, f"{cause} in a forward of {num_layers} layers", fix)
    if output.logits.shape[1] != 1:
        raise ModelRefused(path, f"{type(model).__name__} ignores logits_to_keep", fix)
    return [probe.layers[layer] for layer in range(num_layers)]
