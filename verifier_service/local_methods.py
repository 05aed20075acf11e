"""The draft methods of a verifier with local drafting, built as a drafter builds them, and new weights for them."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from outrider.drafting.checkpoints.recognise import recognise
from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.registry import build_methods
from outrider.drafting.methods.versions import TrialResult, VersionedMethod
from outrider.drafting.settings import LookupSettings, MethodSettings
from outrider.drafting.warm_up import warm_up
from outrider.engine.model.loaded import LoadedModel
from outrider.shared.errors import ConfigError, InvalidRequest, Overloaded
from outrider.shared.messages import DraftMethodInfo
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.engine import VerifierEngine

# versions of a method; each has a cache of --local-kv-cache-mb: the newest, and two that older sessions still have
_MOST_VERSIONS = 3


def build_local_methods(
    config: VerifierConfig, loaded: LoadedModel, log: logging.Logger, prefix: str = "--local-"
) -> dict[str, DraftMethod]:
    """Builds the local draft methods, by name; empty if the settings ask for none.

    prefix: of the settings' names in errors. Raises ConfigError that names the setting.
    """
    if not config.local_draft_model and not config.local_methods:
        return {}
    methods = build_methods(_settings(config), log.info, loaded, prefix=prefix)
    for name, method in methods.items():
        fits = method.info.fits(
            vocab_size=loaded.vocab_size, hidden_size=loaded.hidden_size, num_hidden_layers=loaded.num_layers
        )
        if not fits:
            raise ConfigError(
                f"{prefix}draft-model: {method.info.model} was trained for another target than {config.model}",
                param="local_draft_model",
            )
        started = time.perf_counter()
        if method.info.model:
            warm_up(method)
        took_s = time.perf_counter() - started
        log.info("local drafting with %s %s (warm in %.1f s)", name, method.info.model, took_s)
        if method.info.model and (config.allow_draft_loading or config.learn != "off"):
            methods[name] = VersionedMethod(method)
    return methods


class DraftLoader:
    """Loads new weights for a verifier's own draft methods while it serves."""

    def __init__(self, config: VerifierConfig, engine: VerifierEngine, log: logging.Logger) -> None:
        """Raises ConfigError on a GPU, whose graphs are captured while no other thread uses it."""
        if engine.loaded.device.type != "cpu":
            name = "learn" if config.learn != "off" else "allow_draft_loading"
            raise ConfigError(f"--{name.replace('_', '-')}: only for a target on the CPU", param=name)
        self._settings = _settings(config)
        self._engine = engine
        self._log = log
        self._one_at_a_time = threading.Lock()
        self._methods = {
            name: method for name, method in engine.draft_methods.items() if isinstance(method, VersionedMethod)
        }
        for name, method in self._methods.items():
            engine.metrics.observe_draft_version(name, method.info.version)

    def load(self, path: str, on_trial: Callable[[TrialResult], None] | None = None) -> DraftMethodInfo:
        """Reads and checks the weights on this thread, not the engine's; sessions opened from then on use them.

        on_trial: they are on trial first (drafting.methods.versions), and it is called with the result, on the engine's
        thread. Raises InvalidRequest for what cannot be used, Overloaded while another one is loaded or too many are in
        memory.
        """
        if not self._one_at_a_time.acquire(blocking=False):
            raise Overloaded("another draft is being loaded; try again later")
        try:
            info = self._load(path, on_trial)
        except Exception as error:
            self._log.warning("%s is not taken for drafting: %s", path, error)
            self._engine.metrics.count_draft_load("refused")
            if isinstance(error, ConfigError):
                raise InvalidRequest(error.message, param="path") from error
            raise
        finally:
            self._one_at_a_time.release()
        self._engine.metrics.count_draft_load("taken")
        self._engine.metrics.observe_draft_version(info.name, info.version)
        self._log.info("drafting with %s %s from now on, version %d", info.name, info.model, info.version)
        return info

    def _load(self, path: str, on_trial: Callable[[TrialResult], None] | None) -> DraftMethodInfo:
        name, served = self._served(path)
        if self._engine.between_rounds(lambda: served.num_kept) >= _MOST_VERSIONS:
            raise Overloaded(f"sessions still use {_MOST_VERSIONS - 1} older versions of {name}; try again later")
        settings = dataclasses.replace(self._settings, draft_model=(path,), methods=(name,))
        method = build_methods(settings, self._log.info)[name]
        own = dataclasses.replace(served.info, model=method.info.model, version=method.info.version)
        if method.info != own:
            raise InvalidRequest(f"its shape is {method.info}, the served draft's is {own}", param="path")
        warm_up(method)

        def swap() -> DraftMethodInfo:
            if on_trial is None:
                served.swap(method)
            else:
                served.try_out(method, on_trial)
            return served.info

        return self._engine.between_rounds(swap)

    def _served(self, path: str) -> tuple[str, VersionedMethod]:
        if not (Path(path) / "config.json").is_file():
            raise InvalidRequest(f"{path} is not a checkpoint folder (no config.json) here", param="path")
        name = recognise(path)
        if name not in self._methods:
            served = ", ".join(self._methods) or "none"
            raise InvalidRequest(f"it is a draft for {name}; methods with weights here: {served}", param="path")
        return name, self._methods[name]


def _settings(config: VerifierConfig) -> MethodSettings:
    lookups = {field.name: getattr(config, field.name) for field in dataclasses.fields(LookupSettings)}
    return MethodSettings(
        draft_model=config.local_draft_model,
        target_model=config.model,
        methods=config.local_methods,
        dtype=config.dtype,
        device=config.device,
        attention_backend=config.attention_backend,
        packed_arithmetic=config.packed_arithmetic,
        enforce_eager=config.local_enforce_eager,
        num_threads=config.num_threads,
        block_size=config.block_size,
        kv_cache_mb=config.local_kv_cache_mb,
        prefill_chunk_size=config.prefill_chunk_size,
        max_num_seqs=config.max_num_seqs,
        **lookups,
    )
