"""Builds draft methods by name. A method's module and its dependencies are imported only if it is served."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.settings import MethodSettings
from outrider.shared.checkpoint.mtp_layers import count_mtp_layers, has_mtp_layers
from outrider.shared.draft_policy.named_drafts import NamedDraft, are_told_apart
from outrider.shared.errors import ConfigError

if TYPE_CHECKING:
    from outrider.engine.model.loaded import LoadedModel

Report = Callable[[str], None]
_HEADS = ("eagle3", "dspark", "dflash", "eagle", "mlp_speculator", "medusa")


def build_methods(
    settings: MethodSettings, report: Report, loaded: LoadedModel | None = None, *, prefix: str = "--"
) -> dict[str, DraftMethod]:
    """Builds the methods of settings with at most one checkpoint of a kind; else as `build_heads`."""
    return {
        name: next(iter(heads.values())) for name, heads in build_heads(settings, report, loaded, prefix=prefix).items()
    }


def build_heads(
    settings: MethodSettings, report: Report, loaded: LoadedModel | None = None, *, prefix: str = "--"
) -> dict[str, dict[str, DraftMethod]]:
    """Builds the methods of `plan_methods`: for each its checkpoints by name, "" if there is only one.

    loaded: the target, if it is in this process. prefix: of the settings' flags. Raises ConfigError as `plan_methods`
    does, for an unusable checkpoint, and for too little memory.
    """
    built: dict[str, dict[str, DraftMethod]] = {}
    planned = plan_methods(settings.draft_model, settings.methods, settings.target_model, prefix=prefix)
    if planned.keys() - _WITHOUT_CHECKPOINT.keys():
        from outrider.engine.model.load import resolve_device  # loads torch

        settings = replace(settings, device=resolve_device(settings.device).type)
    for name, drafts in planned.items():
        if name in _WITHOUT_CHECKPOINT:
            built[name] = {"": _WITHOUT_CHECKPOINT[name](settings)}
        elif not drafts:
            built[name] = {"": _FROM_TARGET[name](settings, None, report, loaded)}
        else:
            built[name] = {
                draft.name: _build_from_checkpoint(name, draft.path, settings, report, loaded, prefix)
                for draft in drafts
            }
    return built


def _build_from_checkpoint(
    name: str, path: str, settings: MethodSettings, report: Report, loaded: LoadedModel | None, prefix: str
) -> DraftMethod:
    if name in _FROM_TARGET:
        return _FROM_TARGET[name](settings, path, report, loaded)
    if name == "draft_model":
        return _build_draft_model(settings, path, report, prefix)
    return _HEAD_BUILDERS[name](settings, path, report, loaded)


def plan_methods(
    draft_model: tuple[str, ...], methods: tuple[str, ...], target_model: str, *, prefix: str = "--"
) -> dict[str, tuple[NamedDraft, ...]]:
    """Maps each method -> its checkpoints, without reading weights. prefix: of the settings' flags.

    Empty methods: those of the checkpoints, or without one those of the target's own files, and those that need none.
    Raises ConfigError for an unknown, repeated or missing method, two checkpoints of a kind without a name each, an
    unrecognised one, a head without its target, and a target without what the method needs of it.
    """
    checkpoints = _recognise_all(draft_model, prefix)
    own = tuple(_FROM_TARGET) if not checkpoints and target_model and has_mtp_layers(Path(target_model)) else ()
    plan: dict[str, tuple[NamedDraft, ...]] = {}
    for name in methods or (*own, *checkpoints, *_WITHOUT_CHECKPOINT):
        if name in plan:
            raise ConfigError(f"{prefix}methods: {name!r} is given twice", param="methods")
        if name not in (*_FROM_TARGET, *_FROM_CHECKPOINT, *_WITHOUT_CHECKPOINT):
            choices = ", ".join((*_FROM_TARGET, *_FROM_CHECKPOINT, *_WITHOUT_CHECKPOINT))
            raise ConfigError(f"{prefix}methods: {name!r} is not one of {choices}", param="methods")
        if name in _FROM_CHECKPOINT and name not in checkpoints:
            given = ", ".join(f"{draft} ({kind})" for kind, drafts in checkpoints.items() for draft in drafts) or "none"
            raise ConfigError(
                f"{prefix}draft-model: method {name} needs a checkpoint of its kind; given: {given}",
                param="draft_model",
            )
        if name in (*_HEADS, *_FROM_TARGET) and not target_model:
            raise ConfigError(
                f"--target-model: {name} uses the target's embedding or output head; give the target's folder",
                param="target_model",
            )
        if name in _FROM_TARGET and name not in checkpoints:
            _require_mtp_layers(target_model, prefix)
        plan[name] = tuple(checkpoints.get(name, ()))
    return plan


def _require_mtp_layers(target_model: str, prefix: str) -> None:
    try:
        count_mtp_layers(Path(target_model))
    except ConfigError as error:
        raise ConfigError(f"{prefix}methods: {target_model}: {error.message}", param="methods") from error


def _recognise_all(entries: tuple[str, ...], prefix: str) -> dict[str, list[NamedDraft]]:
    """Maps a method -> its checkpoints, in the order given."""
    if not entries:
        return {}
    from outrider.drafting.checkpoints.errors import CheckpointRefused
    from outrider.drafting.checkpoints.recognise import recognise

    found: dict[str, list[NamedDraft]] = {}
    for draft in map(NamedDraft.of, entries):
        try:
            found.setdefault(recognise(draft.path), []).append(draft)
        except CheckpointRefused as error:
            raise ConfigError(f"{prefix}draft-model: {error.message}", param="draft_model") from error
    for kind, drafts in found.items():
        if not are_told_apart(drafts):
            given = " and ".join(draft.path for draft in drafts)
            raise ConfigError(
                f"{prefix}draft-model: {given} are both {kind}: give each a name of its own, as in "
                f"code={drafts[0].path},chat={drafts[1].path}",
                param="draft_model",
            )
        if len(drafts) == 1:
            drafts[0] = drafts[0]._replace(name="")
    return found


def _num_threads(settings: MethodSettings) -> int:
    return settings.num_threads or len(os.sched_getaffinity(0))


def _build_ngram(settings: MethodSettings) -> DraftMethod:
    from outrider.drafting.methods.ngram import NgramMethod

    return NgramMethod(prompt_lookup_min=settings.prompt_lookup_min, prompt_lookup_max=settings.prompt_lookup_max)


def _build_suffix(settings: MethodSettings) -> DraftMethod:
    from outrider.drafting.methods.suffix import SuffixMethod, SuffixSettings

    return SuffixMethod(
        SuffixSettings(
            max_tree_depth=settings.suffix_decoding_max_tree_depth,
            max_cached_requests=settings.suffix_decoding_max_cached_requests,
            max_cached_nodes=settings.suffix_decoding_max_cached_nodes,
            max_spec_factor=settings.suffix_decoding_max_spec_factor,
            min_token_prob=settings.suffix_decoding_min_token_prob,
        )
    )


def _build_draft_model(settings: MethodSettings, path: str, report: Report, prefix: str) -> DraftMethod:
    from outrider.drafting.methods.draft_model import DraftModelNet, draft_model_method
    from outrider.drafting.vocabulary.mapping import map_vocabulary
    from outrider.engine.attention.block_manager import BlockManager
    from outrider.engine.model.load import load_model
    from outrider.engine.recurrent.memory import describe_slots, plan_memory
    from outrider.engine.run.runner import ModelRunner

    # Mapped before the weights are read, so that an unusable vocabulary is refused at once.
    vocabulary = map_vocabulary(path, settings.target_model) if settings.target_model else None
    if vocabulary is not None:
        report(f"{path} shares {vocabulary.num_shared} tokens with the target's vocabulary")
    loaded = load_model(
        path,
        dtype=settings.dtype,
        device=settings.device,
        attention_backend=settings.attention_backend,
        packed_arithmetic=settings.packed_arithmetic,
        num_threads=_num_threads(settings),
        on_progress=report,
    )
    flag, bytes_per_slot = f"{prefix}kv-cache-mb", loaded.bytes_per_slot()
    plan = plan_memory(
        settings.kv_cache_mb * 2**20,
        loaded.bytes_per_block(settings.block_size),
        bytes_per_slot,
        settings.max_num_seqs,
        flag,
    )
    if plan.num_slots:
        report(f"{path}: {describe_slots(plan, bytes_per_slot, settings.max_num_seqs, flag)}")
    cache = loaded.make_cache(plan.num_blocks, settings.block_size)
    runner = ModelRunner(loaded, cache, loaded.make_states(plan.num_slots), graphs=not settings.enforce_eager)
    chains: Any = None
    if loaded.attention_ops.row_backend == "triton":
        from outrider.engine.sampling.chains import ModelForward
        from outrider.engine.sampling.device_chains import DeviceChains  # needs triton, installed on GPU machines

        chains = DeviceChains(ModelForward(runner))
    elif runner.uses_graphs:
        from outrider.engine.sampling.cpu_chains import model_chains

        chains = model_chains(runner)
    net = DraftModelNet(
        runner,
        BlockManager(plan.num_blocks, settings.block_size),
        prefill_chunk_size=settings.prefill_chunk_size,
        vocabulary=vocabulary,
        chains=chains,
    )
    return draft_model_method(net, Path(path).name)


def _head_builder(kind: str) -> Callable[[MethodSettings, str, Report, LoadedModel | None], DraftMethod]:
    def build(settings: MethodSettings, path: str, report: Report, loaded: LoadedModel | None) -> DraftMethod:
        from outrider.drafting.methods.heads import build_head_method

        report(f"reading {kind} {path}")
        return build_head_method(kind, path, settings, num_threads=_num_threads(settings), loaded=loaded)

    return build


def _build_mtp(settings: MethodSettings, path: str | None, report: Report, loaded: LoadedModel | None) -> DraftMethod:
    from outrider.drafting.methods.heads import build_mtp_method

    report(f"reading the MTP layer of {settings.target_model}" if path is None else f"reading assistant {path}")
    return build_mtp_method(settings, path, num_threads=_num_threads(settings), loaded=loaded)


# Methods whose weights are in the target's own files, unless a checkpoint of their kind is given.
_FROM_TARGET: dict[str, Callable[[MethodSettings, str | None, Report, LoadedModel | None], DraftMethod]] = {
    "mtp": _build_mtp
}
_WITHOUT_CHECKPOINT: dict[str, Callable[[MethodSettings], DraftMethod]] = {
    "ngram": _build_ngram,
    "suffix": _build_suffix,
}
_HEAD_BUILDERS: dict[str, Callable[[MethodSettings, str, Report, LoadedModel | None], DraftMethod]] = {
    kind: _head_builder(kind) for kind in _HEADS
}
_FROM_CHECKPOINT = ("draft_model", *_HEADS)
