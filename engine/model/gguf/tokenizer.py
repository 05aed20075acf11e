"""Writes the tokenizer of a GGUF file as tokenizer.json, by transformers, where it is sure to split text as llama.cpp.

An unknown `tokenizer.ggml.pre` would be split silently as GPT-2 does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.engine.errors import ModelRefused
from outrider.engine.model.gguf.file import GgufFile

# What transformers does not know, as pre-tokenizers of tokenizer.json; GPT-2's is what it takes for those.
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


_SPLITS: dict[str, dict[str, Any] | None] = {
    "deepseek-v3": _one_after_another(_DEEPSEEK_V3),
    "gpt-2": None,
    "refact": _BY_DIGIT,  # Granite
    "smollm": _BY_DIGIT,
}
# Architectures whose config transformers does not read; the class of the tokenizer depends on that alone.
_WITHOUT_CLASS = {"deepseek2", "gpt-oss", "granite", "olmo2"}


def write_tokenizer(file: GgufFile, first_part: Path, folder: Path) -> None:
    """Raises ModelRefused."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    model, pre = file.general("tokenizer.ggml.model"), file.general("tokenizer.ggml.pre")
    if model not in ("gpt2", "llama"):
        raise ModelRefused(file.path, f"its tokenizer.ggml.model is {model!r}; gpt2 and llama are read")
    if model == "gpt2" and pre not in GGUF_PRE_TOKENIZER_SPLITS and pre not in _SPLITS:
        known = ", ".join(sorted({*GGUF_PRE_TOKENIZER_SPLITS, *_SPLITS}))
        raise ModelRefused(file.path, f"its tokenizer.ggml.pre is {pre!r}; read are {known}")
    try:
        reader = PreTrainedTokenizerFast if file.architecture in _WITHOUT_CLASS else AutoTokenizer
        tokenizer = reader.from_pretrained(str(first_part.parent), gguf_file=first_part.name)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # tokenizers raises no class of its own
        raise ModelRefused(file.path, f"transformers cannot read its tokenizer: {error!r}") from error
    split = _SPLITS.get(pre) if model == "gpt2" else None
    if split is not None:
        description = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        (folder / "tokenizer.json").write_text(json.dumps(description | {"pre_tokenizer": split}), encoding="utf-8")
