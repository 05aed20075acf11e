"""Pre-tokenizers that transformers lacks, by `tokenizer.ggml.pre`: how a text is split into words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Pre-tokenizers in tokenizer.json's form. None in SPLITS: transformers' default, GPT-2's, is right.
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BY_DIGIT = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]}
# Applied in sequence (llama.cpp, src/llama-vocab.cpp; DeepSeek-V3's tokenizer.json).
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Cased letters of the alphabets that DeepSeek-LLM's tokenizer.json lists.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴ"
    "ᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_IDEOGRAPHS = "[一-龥ࠀ-一가-퟿]+"
# Applied in sequence: DeepSeek-LLM and V2. Its vocabulary has no token of several digits.
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _IDEOGRAPHS,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")
# Letters but ideographs: of any case but lower, and of any case but upper (Kimi's tokenization_kimi.py).
_KIMI_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_K2 = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Qwen2's in llama.cpp; Llama 3's; the pattern of Seed's tokenizer.json.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def _one_after_another(patterns: Sequence[str]) -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, {**_BYTE_LEVEL, "use_regex": False}]}


SPLITS: dict[str, dict[str, Any] | None] = {
    "chatglm-bpe": _one_after_another([_LLAMA3]),
    "command-r": _BY_DIGIT,
    "deepseek-coder": _one_after_another(_DEEPSEEK_CODER),
    "deepseek-llm": _one_after_another(_DEEPSEEK_LLM),
    "deepseek-v3": _one_after_another(_DEEPSEEK_V3),
    "exaone4": None,
    "glm4": _one_after_another([_LLAMA3]),
    "gpt-2": None,
    "hunyuan": _one_after_another([_QWEN2]),
    "hunyuan-dense": _one_after_another(_DEEPSEEK_V3),
    "kimi-k2": _one_after_another([_KIMI_K2]),
    "olmo": None,
    "refact": _BY_DIGIT,  # Granite
    "seed-coder": _one_after_another([_SEED]),
    "smollm": _BY_DIGIT,
    "starcoder": _BY_DIGIT,
}
# Pre-tokenizers whose words are single tokens where the vocabulary has them, regardless of the merges (llama.cpp, as
# above).
WHOLE_WORDS = frozenset(
    {
        "falcon-h1",
        "falcon3",
        "glm4",
        "jina-v5-nano",
        "lfm2",
        "llama-bpe",
        "llama-v3",
        "llama3",
        "midm-2.0",
        "pixtral",
        "tekken",
    }
)
