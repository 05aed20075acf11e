"""The config of a GGUF file, from its own metadata and tensors.

Every value of the architecture's must be read, or the file is refused: a value that is left out silently gives wrong
logits. The rules are those of llama.cpp (conversion, src/llama-model.cpp, src/models). Not here: what is particular to
an architecture (its record).
"""

from __future__ import annotations

from typing import Any

from outrider.engine.model.gguf.architecture import Architecture
from outrider.engine.model.gguf.architectures import architecture_of
from outrider.engine.model.gguf.file import GgufFile

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
# Ends a turn (Phi-3), but only a part of a turn where the vocabulary has another end of turns (gpt-oss).
_END, _END_AFTER_PARTS = "<|end|>", "<|return|>"
_CONTROL = 3


def model_config(file: GgufFile) -> dict[str, Any]:
    """Returns the contents of config.json. Raises ModelRefused for architectures and settings that are not read."""
    architecture = architecture_of(file)
    config = _common(file, architecture) | architecture.heads(file) | architecture.config(file)
    if config.keys().isdisjoint(("num_experts_per_tok", "moe_k", "top_k_experts")):
        file.require("expert_count", 0)
    file.require_all_read()
    return config | _types(file)


def eos_token_ids(file: GgufFile) -> list[int]:
    """Returns every token that ends a text or a turn."""
    found = {file.general(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    tokens, kinds = file.general("tokenizer.ggml.tokens", []), file.general("tokenizer.ggml.token_type", [])
    ends = _ENDS if _END_AFTER_PARTS in tokens else (*_ENDS, _END)
    found |= {index for index, kind in enumerate(kinds) if kind == _CONTROL and tokens[index] in ends}
    return sorted(found)


def _common(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    vocab_size = int(file.tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in file.tensors else 0
    file.own("vocab_size", vocab_size)  # the embedding may be padded beyond it
    epsilon, own_epsilon = architecture.epsilon
    return {
        epsilon: file.own(own_epsilon),
        "hidden_size": file.own("embedding_length"),
        **({"intermediate_size": file.uniform("feed_forward_length")} if architecture.has_one_width else {}),
        "num_hidden_layers": file.num_layers,
        "max_position_embeddings": file.own("context_length"),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.general("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.general("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.general("tokenizer.ggml.padding_token_id"),
    }


def _types(file: GgufFile) -> dict[str, Any]:
    """Returns the dtype if all matrices have one float type; else the types, as for any quantised checkpoint."""
    types = {tensor.tensor_type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if len(types) == 1 and types <= _EXACT_TYPES.keys():
        return {"dtype": _EXACT_TYPES[types.pop()]}
    return {"dtype": "bfloat16", "quantization_config": {"quant_method": "gguf", "types": sorted(types)}}
