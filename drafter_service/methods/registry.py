"""Builds draft methods by name. A method's module, and what it needs, is imported only when it is served."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from drafter_service.config import DrafterConfig
from drafter_service.methods.interface import DraftMethod
from shared.errors import ConfigError

Report = Callable[[str], None]


def build_methods(config: DrafterConfig, report: Report) -> dict[str, DraftMethod]:
    """Raises ConfigError on an unknown, repeated or missing method."""
    if not config.methods:
        raise ConfigError(f"--methods: name at least one of {', '.join(_BUILDERS)}", param="methods")
    methods: dict[str, DraftMethod] = {}
    for name in config.methods:
        if name not in _BUILDERS:
            raise ConfigError(f"--methods: {name!r} is none of {', '.join(_BUILDERS)}", param="methods")
        if name in methods:
            raise ConfigError(f"--methods: {name!r} is named twice", param="methods")
        methods[name] = _BUILDERS[name](config, report)
    return methods


def _build_ngram(config: DrafterConfig, report: Report) -> DraftMethod:
    from drafter_service.methods.ngram import NgramMethod

    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError("--prompt-lookup-min is larger than --prompt-lookup-max", param="prompt_lookup_min")
    return NgramMethod(prompt_lookup_min=config.prompt_lookup_min, prompt_lookup_max=config.prompt_lookup_max)


def _build_draft_model(config: DrafterConfig, report: Report) -> DraftMethod:
    if not config.draft_model:
        raise ConfigError("--draft-model: method draft_model needs a checkpoint folder", param="draft_model")
    from drafter_service.methods.draft_model import DraftModelNet, draft_model_method
    from engine.block_manager import BlockManager
    from engine.model import load_model
    from engine.runner import ModelRunner

    loaded = load_model(
        config.draft_model,
        dtype=config.dtype,
        device=config.device,
        attention_backend=config.attention_backend,
        num_threads=config.num_threads or len(os.sched_getaffinity(0)),
        on_progress=report,
    )
    num_blocks = max(1, config.kv_cache_mb * 2**20 // loaded.bytes_per_block(config.block_size))
    net = DraftModelNet(
        ModelRunner(loaded, loaded.make_cache(num_blocks, config.block_size)),
        BlockManager(num_blocks, config.block_size),
        prefill_chunk_size=config.prefill_chunk_size,
    )
    return draft_model_method(net, Path(config.draft_model).name)


_BUILDERS: dict[str, Callable[[DrafterConfig, Report], DraftMethod]] = {
    "ngram": _build_ngram,
    "draft_model": _build_draft_model,
}
