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
    """The methods asked for, or all that the checkpoints give and those that need none.

    Raises ConfigError on an unknown, repeated or missing method, or a checkpoint that cannot be served.
    """
    checkpoints = _recognise_all(config.draft_model)
    methods: dict[str, DraftMethod] = {}
    for name in config.methods or (*checkpoints, *_WITHOUT_CHECKPOINT):
        if name in methods:
            raise ConfigError(f"--methods: {name!r} is named twice", param="methods")
        if name in _WITHOUT_CHECKPOINT:
            methods[name] = _WITHOUT_CHECKPOINT[name](config)
        elif name not in _FROM_CHECKPOINT:
            choices = ", ".join((*_FROM_CHECKPOINT, *_WITHOUT_CHECKPOINT))
            raise ConfigError(f"--methods: {name!r} is none of {choices}", param="methods")
        elif name not in checkpoints:
            given = ", ".join(f"{path} ({kind})" for kind, path in checkpoints.items()) or "none"
            raise ConfigError(
                f"--draft-model: method {name} needs a checkpoint of its kind; given: {given}", param="draft_model"
            )
        else:
            methods[name] = _FROM_CHECKPOINT[name](config, checkpoints[name], report)
    return methods


def _recognise_all(paths: tuple[str, ...]) -> dict[str, str]:
    """Method -> checkpoint, in the order given."""
    if not paths:
        return {}
    from drafter_service.checkpoints.recognise import recognise

    found: dict[str, str] = {}
    for path in paths:
        kind = recognise(path)
        if kind in found:
            raise ConfigError(f"--draft-model: {found[kind]} and {path} are both {kind}", param="draft_model")
        found[kind] = path
    return found


def _num_threads(config: DrafterConfig) -> int:
    return config.num_threads or len(os.sched_getaffinity(0))


def _build_ngram(config: DrafterConfig) -> DraftMethod:
    from drafter_service.methods.ngram import NgramMethod

    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError("--prompt-lookup-min is larger than --prompt-lookup-max", param="prompt_lookup_min")
    return NgramMethod(prompt_lookup_min=config.prompt_lookup_min, prompt_lookup_max=config.prompt_lookup_max)


def _build_suffix(config: DrafterConfig) -> DraftMethod:
    from drafter_service.methods.suffix import SuffixMethod, SuffixSettings

    return SuffixMethod(
        SuffixSettings(
            max_tree_depth=config.suffix_decoding_max_tree_depth,
            max_cached_requests=config.suffix_decoding_max_cached_requests,
            max_cached_nodes=config.suffix_decoding_max_cached_nodes,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
            min_token_prob=config.suffix_decoding_min_token_prob,
        )
    )


def _build_draft_model(config: DrafterConfig, path: str, report: Report) -> DraftMethod:
    from drafter_service.methods.draft_model import DraftModelNet, draft_model_method
    from drafter_service.vocabulary_map import map_vocabulary
    from engine.block_manager import BlockManager
    from engine.model import load_model
    from engine.runner import ModelRunner

    # Before the weights are read: a vocabulary that is of no use is refused at once.
    vocabulary = map_vocabulary(path, config.target_model) if config.target_model else None
    if vocabulary is not None:
        report(f"{path} has another vocabulary than the target: {vocabulary.num_shared} tokens are shared")
    loaded = load_model(
        path,
        dtype=config.dtype,
        device=config.device,
        attention_backend=config.attention_backend,
        num_threads=_num_threads(config),
        on_progress=report,
    )
    num_blocks = max(1, config.kv_cache_mb * 2**20 // loaded.bytes_per_block(config.block_size))
    cache = loaded.make_cache(num_blocks, config.block_size)
    runner = ModelRunner(loaded, cache, graphs=not config.enforce_eager)
    chains = None
    if loaded.attention_ops.row_backend == "triton":
        from engine.chains import ModelForward
        from engine.device_chains import DeviceChains  # triton is there on machines with a GPU

        chains = DeviceChains(ModelForward(runner))
    net = DraftModelNet(
        runner,
        BlockManager(num_blocks, config.block_size),
        prefill_chunk_size=config.prefill_chunk_size,
        vocabulary=vocabulary,
        chains=chains,
    )
    return draft_model_method(net, Path(path).name)


def _head_builder(kind: str) -> Callable[[DrafterConfig, str, Report], DraftMethod]:
    def build(config: DrafterConfig, path: str, report: Report) -> DraftMethod:
        from drafter_service.methods.heads import build_head_method

        if not config.target_model:
            raise ConfigError(
                f"--target-model: {kind} uses the target's embedding or output head; name the target's folder",
                param="target_model",
            )
        report(f"reading {kind} {path}")
        return build_head_method(kind, path, config, num_threads=_num_threads(config))

    return build


_WITHOUT_CHECKPOINT: dict[str, Callable[[DrafterConfig], DraftMethod]] = {
    "ngram": _build_ngram,
    "suffix": _build_suffix,
}
_FROM_CHECKPOINT: dict[str, Callable[[DrafterConfig, str, Report], DraftMethod]] = {
    "draft_model": _build_draft_model,
    **{kind: _head_builder(kind) for kind in ("eagle3", "eagle", "mlp_speculator", "medusa")},
}
