"""Reads other weights of the target beside what serves, and checks that they can take its place.

Not here: when they take over (reloader.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outrider.engine.certificate import Certificate, certify
from outrider.engine.errors import ModelRefused
from outrider.engine.model.guards import read_config
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.model.local_model import local_model
from outrider.engine.model.weight_files import stored_tensors
from outrider.engine.model.weights_digest import checkpoint_files, weights_digest
from outrider.engine.numerics import measure_numerics
from outrider.engine.run.runner import ModelRunner
from outrider.shared.checkpoint.file_names import linked_parts
from outrider.shared.checkpoint.tokenizer_digest import tokenizer_digest
from outrider.shared.errors import ConfigError, InvalidRequest, Overloaded
from outrider.shared.machine.memory import available_memory_bytes
from outrider.shared.messages import WEIGHTS_MARK
from outrider.verifier_service.config import VerifierConfig

# keys of a config.json that say who wrote the checkpoint, not what it computes
_SAID_BY_WRITER = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "use_cache"})


@dataclass(frozen=True)
class Candidate:
    """Other weights, ready to run on the cache of those that serve. numerics: their kind."""

    loaded: LoadedModel
    runner: ModelRunner
    certificate: Certificate
    numerics: str


def target_kind(loaded: LoadedModel, config: VerifierConfig) -> str:
    """Returns the kind of sessions: the arithmetic, and where weights can be replaced their digest."""
    numerics = measure_numerics(
        loaded, tensor_parallel_size=config.tensor_parallel_size, graphs=not config.enforce_eager
    )
    return numerics + WEIGHTS_MARK + weights_digest(Path(loaded.path)) if config.allow_target_reload else numerics


def read_candidate(path: str, served: ModelRunner, config: VerifierConfig, report: Callable[[str], None]) -> Candidate:
    """Reads and checks a checkpoint, without changing what serves; on any thread but the engine's.

    Raises InvalidRequest that names what is wrong, Overloaded for too little memory.
    """
    try:
        if not path:
            raise InvalidRequest("give a checkpoint folder or .gguf file", param="path")
        folder = local_model(path, "path")
        _require_same_config(folder, served.loaded)
        _require_memory(folder)
        _require_finite(folder)
        loaded = load_model(
            folder,
            dtype=config.dtype,
            device=config.device,
            attention_backend=config.attention_backend,
            max_model_len=config.max_model_len or None,
            on_progress=report,
            kv_cache_dtype=config.kv_cache_dtype,
            packed_arithmetic=config.packed_arithmetic,
        )
        _require_same_shape(loaded, served.loaded)
        # A trainer may write no tokenizer, which names some too.
        loaded = replace(loaded, eos_token_ids=served.loaded.eos_token_ids)
    except ModelRefused as error:
        raise InvalidRequest(error.message, param="path") from error
    except ConfigError as error:
        raise InvalidRequest(f"{path}: {error.message}", param="path") from error
    runner = ModelRunner(loaded, served.cache, served.states, graphs=not config.enforce_eager)
    return Candidate(loaded, runner, certify(loaded, runner), target_kind(loaded, config))


def _require_same_config(folder: str, served: LoadedModel) -> None:
    ours, theirs = _said(folder), _said(served.path)
    other = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if other:
        differences = "; ".join(f"{key} {ours.get(key)!r}, here {theirs.get(key)!r}" for key in other[:4])
        raise InvalidRequest(f"{folder} is not of the served target's config: {differences}", param="path")
    tokenizer = tokenizer_digest(folder)
    if tokenizer and tokenizer != tokenizer_digest(served.path):
        raise InvalidRequest(f"{folder} has another tokenizer than the served target", param="path")


def _said(folder: str) -> dict[str, Any]:
    fields: dict[str, Any] = read_config(folder).to_dict()
    return {key: value for key, value in fields.items() if key not in _SAID_BY_WRITER}


def _require_memory(folder: str) -> None:
    """Both targets are in memory until the old one is let go."""
    needed, available = sum(file.stat().st_size for file in checkpoint_files(Path(folder))), available_memory_bytes()
    if available is not None and needed > available:
        raise Overloaded(f"{folder} has {needed >> 20} MiB of weights, and {available >> 20} MiB of memory are left")


def _require_finite(folder: str) -> None:
    """Raises InvalidRequest for a weight that is no number; of a .gguf file the forwards' results are looked at."""
    if linked_parts(Path(folder)):
        return
    for tensor in stored_tensors(Path(folder)).values():
        if tensor.is_float and not bool(torch.isfinite(tensor.read()).all()):
            raise InvalidRequest(f"{folder}: {tensor.name} has values that are not finite", param="path")


def _require_same_shape(loaded: LoadedModel, served: LoadedModel) -> None:
    for name in (
        *("architecture", "dtype", "layer_shapes", "recurrent_shapes", "vocab_size", "hidden_size", "num_layers"),
        *("max_model_len", "kv_code_dtype"),
    ):
        ours, theirs = getattr(loaded, name), getattr(served, name)
        if ours != theirs:
            raise InvalidRequest(f"{loaded.path}: its {name} is {ours}, the served target's {theirs}", param="path")
    if not set(loaded.eos_token_ids) <= set(served.eos_token_ids):
        raise InvalidRequest(
            f"{loaded.path}: its outputs end with {loaded.eos_token_ids}, here with {served.eos_token_ids}",
            param="path",
        )
