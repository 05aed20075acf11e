"""A folder for a draft head in Mistral's own layout: config.json and model.safetensors in the names of transformers.

Mistral publishes its EAGLE heads as params.json and consolidated*.safetensors alone. Not here: whole models, of which
it publishes transformers' layout too, and where the folder is kept (made_folder).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from outrider.engine.errors import ModelRefused
from outrider.engine.model.folders.made_folder import made_folder
from outrider.shared.checkpoint.file_names import PARAMS_FILE, native_weights
from outrider.shared.checkpoint.json_file import read_object
from outrider.shared.errors import ConfigError

if TYPE_CHECKING:
    import torch

# version of the written files; changing it remakes the folders
_VERSION = 2
_SIZES = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}
_LATENT_SIZES = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
_PARTS = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_ENDS = {"eagle_linear": "fc", "tok_embeddings": "embed_tokens", "output": "lm_head", "norm": "norm"}
# Keys of layers that are not computed here -> what they are.
_OTHER_LAYERS = {"moe": "experts"}
# positions, where params.json does not say how many
_POSITIONS = 131_072


def mistral_folder(path: str) -> str:
    """Returns the folder made for a head; the path itself for any other folder. Raises ModelRefused."""
    source = Path(path).absolute()
    weights = native_weights(source)
    if not weights:
        return path
    files = [source / PARAMS_FILE, *weights]
    # The folder keeps the name, as the head is named after it.
    return made_folder("mistral", _VERSION, source.name, files, lambda folder: _make(path, weights, folder))


def _make(path: str, weights: list[Path], folder: Path) -> None:
    from safetensors.torch import load_file, save_file  # imports torch, which most commands do without

    try:
        params = read_object(Path(path) / PARAMS_FILE)
        tensors = {name: tensor for file in weights for name, tensor in load_file(file).items()}
    except (ConfigError, OSError, SafetensorError) as error:
        raise ModelRefused(path, f"its files cannot be read: {error}", "download the checkpoint again") from error
    if "eagle_linear.weight" not in tensors:
        cause = f"it has {PARAMS_FILE} and no config.json, and is no EAGLE head (eagle_linear.weight)"
        raise ModelRefused(path, cause, "give a checkpoint in the layout of transformers")
    config = _config(path, params)
    if params.get("quantization"):
        tensors = _dequantised(path, params["quantization"], tensors)
    renamed = {_name(path, name): _half_rotated(path, name, tensor, config) for name, tensor in tensors.items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


def _config(path: str, params: Mapping[str, Any]) -> dict[str, Any]:
    for key, layers in _OTHER_LAYERS.items():
        if params.get(key):
            raise ModelRefused(path, f"its {PARAMS_FILE} has {key}: heads with {layers} are not read in this layout")
    sizes = {ours: params.get(key) for key, ours in _SIZES.items()}
    for key, ours in _SIZES.items():
        size = sizes[ours]
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ModelRefused(path, f"{key} of its {PARAMS_FILE} is {str(params.get(key))[:40]}, not a whole number")
    rope = {"rope_type": "default", "rope_theta": params.get("rope_theta", 10000.0)}
    yarn = params.get("yarn")
    if isinstance(yarn, dict):
        rope |= {"rope_type": "yarn"} | {ours: yarn[key] for key, ours in _YARN.items() if key in yarn}
        if not yarn.get("apply_scale", True):
            rope["attention_factor"] = 1.0
        elif params.get("kv_lora_rank"):  # its scores are scaled, not its angles
            rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    scaling = params.get("llama_4_scaling")
    if params.get("kv_lora_rank") and isinstance(scaling, dict) and scaling.get("beta"):
        rope["llama_4_scaling_beta"] = scaling["beta"]
        rope["original_max_position_embeddings"] = scaling.get("original_max_position_embeddings")
    return {
        **sizes,
        **{name: params[name] for name in _LATENT_SIZES if params.get(name)},
        "architectures": ["EagleMistralForCausalLM"],
        "model_type": "mistral",
        "rms_norm_eps": params.get("norm_eps", 1e-5),
        "max_position_embeddings": params.get("max_position_embeddings") or _POSITIONS,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
    }


def _dequantised(path: str, scheme: object, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the weights in bfloat16, each times its tensor's scale. What scales activations is left out."""
    import torch

    if not isinstance(scheme, dict) or scheme.get("qformat_weight") != "fp8_e4m3":
        raise ModelRefused(path, f"quantization of its {PARAMS_FILE} is {str(scheme)[:80]}; fp8_e4m3 alone is read")
    plain = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.qscale_(weight|act)$", name)}
    for name, tensor in tensors.items():
        weight = name.replace(".qscale_weight", ".weight")
        if weight != name and (tensor.numel() != 1 or weight not in plain):
            raise ModelRefused(path, f"tensor {name} {list(tensor.shape)} is not the one scale of a weight")
        if weight != name:
            plain[weight] = (plain[weight].float() * tensor.float()).to(torch.bfloat16)
    return plain


def _name(path: str, name: str) -> str:
    """Returns transformers' name of a tensor."""
    module = name.removesuffix(".weight")
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    renamed = f"layers.{layer[1]}.{_PARTS[layer[2]]}" if layer and layer[2] in _PARTS else _ENDS.get(module)
    if renamed is None or module == name:
        raise ModelRefused(path, f"it has a tensor {name[:80]}, which an EAGLE head of Mistral's does not have")
    return f"{renamed}.weight"


def _half_rotated(path: str, name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Returns the rows of queries and keys in the order of transformers, which rotates the halves of a head.

    Mistral's layout rotates neighbouring elements.
    """
    if not name.endswith(("attention.wq.weight", "attention.wk.weight")):
        return tensor
    head_dim = config["head_dim"]
    if tensor.ndim != 2 or tensor.shape[0] % head_dim or head_dim % 2:
        raise ModelRefused(path, f"tensor {name} has shape {list(tensor.shape)}, and heads of {head_dim}")
    pairs = tensor.reshape(-1, head_dim // 2, 2, tensor.shape[1])
    return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()
