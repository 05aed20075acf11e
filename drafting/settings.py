"""Settings of the draft methods, in a drafter and in a verifier that drafts in its own process."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.engine.settings import ModelSettings
from outrider.shared.config import setting
from outrider.shared.errors import ConfigError


@dataclass(frozen=True)
class LookupSettings:
    """Settings of the methods without a checkpoint."""

    prompt_lookup_min: int = setting(1, "Shortest n-gram to look up.", minimum=1, maximum=64)
    prompt_lookup_max: int = setting(5, "Longest n-gram to look up.", minimum=1, maximum=64)
    suffix_decoding_max_tree_depth: int = setting(
        24, "Method suffix: maximum tokens of a match plus its draft.", minimum=2, maximum=256
    )
    suffix_decoding_max_cached_requests: int = setting(
        10_000, "Method suffix: outputs of ended sessions to search; 0: only the session's own text.", minimum=0
    )
    suffix_decoding_max_cached_nodes: int = setting(
        1_000_000,
        "Method suffix: maximum tree nodes for those outputs (130 bytes each, about 1.2 per token).",
        minimum=6,
    )
    suffix_decoding_max_spec_factor: float = setting(
        1.0, "Method suffix: maximum draft tokens per matched token.", minimum=0, maximum=256
    )
    suffix_decoding_min_token_prob: float = setting(
        0.1, "Method suffix: minimum estimated probability of a draft path.", minimum=0, maximum=1
    )

    def __post_init__(self) -> None:
        """Raises ConfigError if the settings contradict each other."""
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError("--prompt-lookup-min is larger than --prompt-lookup-max", param="prompt_lookup_min")


@dataclass(frozen=True)
class MethodSettings(LookupSettings, ModelSettings):
    """The settings of `methods.registry.build_methods`."""

    draft_model: tuple[str, ...] = setting(
        (),
        "Folders of draft models and trained heads, comma-separated; their methods are detected. Several of one kind: "
        "NAME=FOLDER each; every session gets the one that drafts best for sessions that begin alike.",
    )
    target_model: str = setting(
        "",
        "Folder of the target's checkpoint: mtp drafts with its MTP layer, heads use its embedding and output head, "
        "draft models its tokenizer.",
    )
    methods: tuple[str, ...] = setting(
        (),
        "Draft methods to serve, comma-separated; empty: those of --draft-model, or without it the target's own MTP "
        "layer if it has one, and those that need neither.",
    )
    kv_cache_mb: int = setting(128, "Memory for the KV cache, in MiB.", minimum=1)
    max_num_seqs: int = setting(128, "Concurrent sessions; more are refused with RESOURCE_EXHAUSTED.", minimum=1)
