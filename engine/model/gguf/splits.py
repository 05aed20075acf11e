"""How a text is split before its tokens are looked for, by `tokenizer.ggml.pre`: what transformers does not know of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# As pre-tokenizers of tokenizer.json; GPT-2's is what it takes for those.
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BY_DIGIT = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]}
# One after another (llama.cpp, src/llama-vocab.cpp; DeepSeek-V3's tokenizer.json).
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def _one_after_another(patterns: Sequence[str]) -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, {**_BYTE_LEVEL, "use_regex": False}]}


SPLITS: dict[str, dict[str, Any] | None] = {
    "deepseek-v3": _one_after_another(_DEEPSEEK_V3),
    "gpt-2": None,
    "refact": _BY_DIGIT,  # Granite
    "smollm": _BY_DIGIT,
}
