"""Writes a GGUF file's tokenizer as tokenizer.json through transformers, if it surely splits text as llama.cpp does.

transformers would silently split an unknown `tokenizer.ggml.pre` as GPT-2's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.engine.model.gguf.architectures import architecture_of
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.splits import SPLITS, WHOLE_WORDS

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's
_MODELS = ("gemma4", "gpt2", "llama")


def write_tokenizer(file: GgufFile, first_part: Path, folder: Path) -> None:
    """Writes the tokenizer and its chat templates into the folder. Raises ModelRefused."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
        GGUF_SENTENCEPIECE_BUILDERS,
    )

    architecture = architecture_of(file)
    if architecture.tokenizer_like:
        like = GGUF_SENTENCEPIECE_BUILDERS[architecture.tokenizer_like]
        GGUF_SENTENCEPIECE_BUILDERS.setdefault(file.architecture, like)
    model, pre = file.general("tokenizer.ggml.model"), file.general("tokenizer.ggml.pre")
    if model not in _MODELS:
        raise file.not_read(f"its tokenizer.ggml.model is {model!r}; {', '.join(_MODELS)} are read")
    if model == "gpt2" and pre not in GGUF_PRE_TOKENIZER_SPLITS and pre not in SPLITS:
        known = ", ".join(sorted({*GGUF_PRE_TOKENIZER_SPLITS, *SPLITS}))
        raise file.not_read(f"its tokenizer.ggml.pre is {pre!r}; read are {known}")
    try:
        reader = AutoTokenizer if architecture.has_tokenizer_class else PreTrainedTokenizerFast
        tokenizer = reader.from_pretrained(str(first_part.parent), gguf_file=first_part.name)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # tokenizers raises no class of its own
        raise file.not_read(f"transformers cannot read its tokenizer: {error!r}") from error
    with_tools = file.general("tokenizer.chat_template.tool_use")  # transformers reads the other one
    if isinstance(with_tools, str):
        more = folder / "additional_chat_templates"
        more.mkdir(exist_ok=True)
        (more / "tool_use.jinja").write_text(with_tools, encoding="utf-8")
    description = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    if model == "gpt2":
        description["pre_tokenizer"] = SPLITS.get(pre) or description["pre_tokenizer"]
        description["model"]["ignore_merges"] = pre in WHOLE_WORDS
    elif (description["pre_tokenizer"] or {}).get("type") == "Metaspace":
        _as_sentencepiece(description, has_space_before=file.general("tokenizer.ggml.add_space_prefix", True))
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")


def _as_sentencepiece(description: dict[str, Any], *, has_space_before: bool) -> None:
    """Puts a space before every text, also before one that begins with a space, or before none.

    transformers puts it only before texts that begin with no space, whatever the file says.
    """
    prepended = [{"type": "Prepend", "prepend": _SPACE}] if has_space_before else []
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    description |= {"normalizer": {"type": "Sequence", "normalizers": [*prepended, replaced]}, "pre_tokenizer": None}
    if not has_space_before:
        decoders = description["decoder"]["decoders"]
        description["decoder"]["decoders"] = [decoder for decoder in decoders if decoder["type"] != "Strip"]
