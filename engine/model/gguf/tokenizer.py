"""Writes the tokenizer of a GGUF file as tokenizer.json, by transformers, where it is sure to split text as llama.cpp.

An unknown `tokenizer.ggml.pre` would be split silently as GPT-2 does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.engine.errors import ModelRefused
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.splits import SPLITS, WHOLE_WORDS

# Architectures whose tokenizer is of a class of its own in transformers; it does not read the config of most others.
_WITH_CLASS = {"gemma2", "gemma3", "llama", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe"}


def write_tokenizer(file: GgufFile, first_part: Path, folder: Path) -> None:
    """Raises ModelRefused."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    model, pre = file.general("tokenizer.ggml.model"), file.general("tokenizer.ggml.pre")
    if model not in ("gpt2", "llama"):
        raise ModelRefused(file.path, f"its tokenizer.ggml.model is {model!r}; gpt2 and llama are read")
    if model == "gpt2" and pre not in GGUF_PRE_TOKENIZER_SPLITS and pre not in SPLITS:
        known = ", ".join(sorted({*GGUF_PRE_TOKENIZER_SPLITS, *SPLITS}))
        raise ModelRefused(file.path, f"its tokenizer.ggml.pre is {pre!r}; read are {known}")
    try:
        reader = AutoTokenizer if file.architecture in _WITH_CLASS else PreTrainedTokenizerFast
        tokenizer = reader.from_pretrained(str(first_part.parent), gguf_file=first_part.name)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # tokenizers raises no class of its own
        raise ModelRefused(file.path, f"transformers cannot read its tokenizer: {error!r}") from error
    description = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    if model == "gpt2":
        description["pre_tokenizer"] = SPLITS.get(pre) or description["pre_tokenizer"]
        description["model"]["ignore_merges"] = pre in WHOLE_WORDS
    elif not file.general("tokenizer.ggml.add_space_prefix", True):
        _without_space_before(description)
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")


def _without_space_before(description: dict[str, Any]) -> None:
    """Of a text; transformers' reader of GGUF has it always, but for Gemma's."""
    if (description["pre_tokenizer"] or {}).get("type") == "Metaspace":
        description["pre_tokenizer"]["prepend_scheme"] = "never"
        decoders = description["decoder"]["decoders"]
        description["decoder"]["decoders"] = [decoder for decoder in decoders if decoder["type"] != "Strip"]
