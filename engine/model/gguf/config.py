"""The config of each architecture that is read from GGUF, from the file's own metadata and tensors.

Every value of the architecture's is read, or the file is refused: what is left out silently gives wrong logits. The
rules are those of llama.cpp (conversion, src/llama-model.cpp, src/models). Not here: those of each family (dense,
gemma, mixtures, hybrids).
"""

from __future__ import annotations

from typing import Any

from outrider.engine.model.gguf.dense import DENSE, phi3_heads
from outrider.engine.model.gguf.family import Rules
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.gemma import GEMMA, gemma4_heads
from outrider.engine.model.gguf.hybrids import HYBRIDS
from outrider.engine.model.gguf.mixtures import MIXTURES, latent_heads
from outrider.engine.model.gguf.rope import rope_parameters

# By architecture: the norms' epsilon in config.json and in the file.
_EPSILONS: dict[str, tuple[str, str]] = {
    "cohere2": ("layer_norm_eps", "attention.layer_norm_epsilon"),
    "command-r": ("layer_norm_eps", "attention.layer_norm_epsilon"),
    "lfm2": ("norm_eps", "attention.layer_norm_rms_epsilon"),
    "lfm2moe": ("norm_eps", "attention.layer_norm_rms_epsilon"),
    "nemotron_h": ("layer_norm_epsilon", "attention.layer_norm_epsilon"),
    "nemotron_h_moe": ("layer_norm_epsilon", "attention.layer_norm_epsilon"),
    "starcoder2": ("norm_epsilon", "attention.layer_norm_epsilon"),
}
_RMS_EPSILON = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
# Architectures without positions; what their files say of RoPE means nothing.
_WITHOUT_ROPE = {"nemotron_h", "nemotron_h_moe"}
# Architectures whose layers may differ in width.
_WIDTHS_BY_LAYER = {"gemma4"}
# Architectures of whose heads a part may be rotated alone.
_ROTATED_IN_PART = {"glm4", "glm4moe", "minimax-m2", "qwen3next", "qwen35", "qwen35moe"}
_EXACT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Texts of control tokens that end a turn or a text, in files that name one end only (llama.cpp, src/llama-vocab.cpp).
_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<turn|>",
    "<eos>",
    "[e~[",
    "<|return|>",
    "<|call|>",
    "[EOT]",
    "[EOS]",
)
# Ends a turn (Phi-3), but only a part of one where there is another end of turns (gpt-oss).
_END, _END_AFTER_PARTS = "<|end|>", "<|return|>"
_CONTROL = 3


def model_config(file: GgufFile) -> dict[str, Any]:
    """What config.json says. Raises ModelRefused for architectures and settings that are not read."""
    rules = _ARCHITECTURES.get(file.architecture)
    if rules is None:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise file.not_read(f"its architecture is {file.architecture!r}; of GGUF files, {known} are read")
    heads = _HEADS_OF.get(file.architecture, _heads)
    config = _common(file) | heads(file) | rules(file)
    if config.keys().isdisjoint(("num_experts_per_tok", "moe_k", "top_k_experts")):
        file.require("expert_count", 0)
    file.require_all_read()
    return config | _types(file)


def eos_token_ids(file: GgufFile) -> list[int]:
    """Every token that ends a text or a turn."""
    found = {file.general(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    tokens, kinds = file.general("tokenizer.ggml.tokens", []), file.general("tokenizer.ggml.token_type", [])
    ends = _ENDS if _END_AFTER_PARTS in tokens else (*_ENDS, _END)
    found |= {index for index, kind in enumerate(kinds) if kind == _CONTROL and tokens[index] in ends}
    return sorted(found)


def _common(file: GgufFile) -> dict[str, Any]:
    vocab_size = int(file.tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in file.tensors else 0
    file.own("vocab_size", vocab_size)  # the embedding may be padded beyond it
    epsilon, own_epsilon = _EPSILONS.get(file.architecture, _RMS_EPSILON)
    return {
        epsilon: file.own(own_epsilon),
        "hidden_size": file.own("embedding_length"),
        **({} if file.architecture in _WIDTHS_BY_LAYER else {"intermediate_size": file.uniform("feed_forward_length")}),
        "num_hidden_layers": file.num_layers,
        "max_position_embeddings": file.own("context_length"),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.general("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.general("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.general("tokenizer.ggml.padding_token_id"),
    }


def _heads(file: GgufFile) -> dict[str, Any]:
    num_heads = file.uniform("attention.head_count")
    head_dim = file.own("attention.key_length", file.own("embedding_length") // num_heads)
    file.require("attention.value_length", head_dim)
    rope = rope_parameters(file)
    rotated = file.own("rope.dimension_count", head_dim)
    if file.architecture in _ROTATED_IN_PART:
        rope["partial_rotary_factor"] = rotated / head_dim
    elif file.architecture not in _WITHOUT_ROPE:
        file.require("rope.dimension_count", head_dim)
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.uniform("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rope_parameters": rope,
    }


def _types(file: GgufFile) -> dict[str, Any]:
    """The dtype of matrices that are stored whole; else the types, as of any quantised checkpoint."""
    types = {tensor.tensor_type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if len(types) == 1 and types <= _EXACT_TYPES.keys():
        return {"dtype": _EXACT_TYPES[types.pop()]}
    return {"dtype": "bfloat16", "quantization_config": {"quant_method": "gguf", "types": sorted(types)}}


_ARCHITECTURES: dict[str, Rules] = {**DENSE, **GEMMA, **MIXTURES, **HYBRIDS}
# Of those whose heads have more to say than a width.
_HEADS_OF: dict[str, Rules] = {"deepseek2": latent_heads, "gemma4": gemma4_heads, "phi3": phi3_heads}
