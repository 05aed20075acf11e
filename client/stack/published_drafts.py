"""Finds what could draft for a target that is started without a draft: its own MTP layer, or a published head.

The names are their publishers'; nothing is looked up or downloaded. docs/which-drafter.md has a row for each.
"""

from __future__ import annotations

import json
from pathlib import Path

from outrider.client.stack.commands import StackSettings, methods_without_draft
from outrider.shared.checkpoint.mtp_layers import has_mtp_layers
from outrider.shared.draft_policy.draft_methods import AUTO, FROM_TARGET, OFF
from outrider.shared.speculative_config import parse_speculative_config

# tokens; drafted at a time by an MTP layer or an EAGLE-3 head: the third costs little, a fourth is seldom accepted
_CHAIN_TOKENS = 3

# A target's Hub name without its owner -> method, draft, tokens that it drafts at a time.
PUBLISHED_DRAFTS: dict[str, tuple[str, str, int]] = {
    "Llama-3.1-8B-Instruct": ("eagle3", "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", _CHAIN_TOKENS),
    "Llama-3.3-70B-Instruct": ("eagle3", "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3", _CHAIN_TOKENS),
    "Qwen3-4B": ("dspark", "deepseek-ai/dspark_qwen3_4b_block7", 7),
    "Qwen3-8B": ("dspark", "deepseek-ai/dspark_qwen3_8b_block7", 7),
    "Qwen3-14B": ("dspark", "deepseek-ai/dspark_qwen3_14b_block7", 7),
    "Qwen3-32B": ("eagle3", "RedHatAI/Qwen3-32B-speculator.eagle3", _CHAIN_TOKENS),
    "Qwen3-Coder-30B-A3B-Instruct": ("dflash", "z-lab/Qwen3-Coder-30B-A3B-DFlash", 8),
    "gpt-oss-20b": ("eagle3", "RedHatAI/gpt-oss-20b-speculator.eagle3", _CHAIN_TOKENS),
    "gpt-oss-120b": ("eagle3", "RedHatAI/gpt-oss-120b-speculator.eagle3", _CHAIN_TOKENS),
    "gemma-4-31B-it": ("mtp", "google/gemma-4-31B-it-assistant", 4),
}


def unused_draft(settings: StackSettings, name: str) -> str:
    """Returns the --speculative-config of a draft that the stack could have and has not; "" if none is known.

    name: the target as it was typed, a Hub id or a path; the settings have its folder.
    """
    method = parse_speculative_config(settings.speculative_config).method
    if settings.draft_folders or method not in (OFF, AUTO):
        return ""
    known = {target.casefold(): draft for target, draft in PUBLISHED_DRAFTS.items()}
    published = known.get(Path(name.partition("@")[0]).name.casefold())
    if published is not None:
        keys = ("method", "model", "num_speculative_tokens")
        return json.dumps(dict(zip(keys, published, strict=True)))
    drafts_with_it = set(FROM_TARGET).intersection(methods_without_draft(settings))
    if drafts_with_it or not has_mtp_layers(Path(settings.model)):
        return ""
    return json.dumps({"method": "mtp", "num_speculative_tokens": _CHAIN_TOKENS})
