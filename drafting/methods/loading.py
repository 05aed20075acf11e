"""New weights for draft methods that serve: read beside what the process does, and swapped in between rounds."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge

from outrider.drafting.checkpoints.recognise import recognise
from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.registry import build_methods, plan_methods
from outrider.drafting.methods.versions import TrialResult, VersionedMethod
from outrider.drafting.settings import MethodSettings
from outrider.drafting.warm_up import warm_up
from outrider.engine.model.loaded import LoadedModel
from outrider.shared.errors import ConfigError, InvalidRequest, Overloaded
from outrider.shared.messages import DraftMethodInfo

# versions of a method; each has a cache of its own: the newest, and two that older sessions still have
_MOST_VERSIONS = 3

OnTrial = Callable[[TrialResult], None]


class DraftVersionMetrics:
    """What was loaded, and which version serves."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._version = Gauge(
            "outrider:draft_version", "Version of a method's weights; 1: the first.", ["method"], registry=registry
        )
        self._loads = Counter(
            "outrider:draft_loads", "Loads of weights for drafting, by outcome.", ["outcome"], registry=registry
        )

    def serves(self, info: DraftMethodInfo) -> None:
        self._version.labels(info.name).set(info.version)

    def count_load(self, outcome: str) -> None:
        """outcome: taken or refused."""
        self._loads.labels(outcome).inc()


def require_cpu(device: torch.device, option: str) -> None:
    """Raises ConfigError for `option` on a GPU, whose graphs are captured while no other thread uses it."""
    if device.type != "cpu":
        raise ConfigError(f"--{option}: only on the CPU, not on {device}", param=option.replace("-", "_"))


class DraftLoader:
    """Loads new weights for those of `methods` that have versions.

    settings: of all of them. between_rounds: calls what it is given on the engine's thread, and returns its result.
    """

    def __init__(
        self,
        settings: MethodSettings,
        methods: Mapping[str, DraftMethod],
        between_rounds: Callable[[Callable[[], Any]], Any],
        metrics: DraftVersionMetrics,
        log: logging.Logger,
    ) -> None:
        self._settings, self._log, self._metrics = settings, log, metrics
        self._between_rounds = between_rounds
        self._one_at_a_time = threading.Lock()
        # The checkpoint of each method that has one, as loaded last.
        planned = plan_methods(settings.draft_model, settings.methods, settings.target_model)
        self._paths = {name: path for name, path in planned.items() if path is not None}
        self._methods = {name: method for name, method in methods.items() if isinstance(method, VersionedMethod)}
        for method in self._methods.values():
            metrics.serves(method.info)

    def load(self, path: str, on_trial: OnTrial | None = None) -> DraftMethodInfo:
        """Reads and checks the weights on this thread, not the engine's; sessions opened from then on use them.

        on_trial: they are on trial first (versions.py), and it is called with the result, on the engine's thread.
        Raises InvalidRequest for what cannot be used, Overloaded while another one is loaded or too many are in memory.
        """
        with self.alone():
            try:
                info = self._load(path, on_trial)
            except Exception as error:
                self._log.warning("%s is not taken for drafting: %s", path, error)
                self._metrics.count_load("refused")
                if isinstance(error, ConfigError):
                    raise InvalidRequest(error.message, param="path") from error
                raise
        self._metrics.count_load("taken")
        self._metrics.serves(info)
        self._log.info("drafting with %s %s from now on, version %d", info.name, info.model, info.version)
        return info

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other loads out. Raises Overloaded while one is under way."""
        if not self._one_at_a_time.acquire(blocking=False):
            raise Overloaded("other weights are being loaded; try again later")
        try:
            yield
        finally:
            self._one_at_a_time.release()

    def rebuilt(self, target: LoadedModel) -> Callable[[], None]:
        """Builds the heads for other weights of their target, whose embedding and output head they use; `alone`.

        Draft models need none of the target's weights. What is returned swaps them in, on the engine's thread. Raises
        InvalidRequest.
        """
        names = tuple(name for name in self._methods if name != "draft_model")
        if not names:
            return lambda: None
        folders = tuple(self._paths[name] for name in names if name in self._paths)
        settings = dataclasses.replace(self._settings, target_model=target.path, draft_model=folders, methods=names)
        try:
            methods = build_methods(settings, self._log.info, target)
        except ConfigError as error:
            raise InvalidRequest(f"{target.path}: {error.message}", param="path") from error
        for name in names:
            warm_up(methods[name])

        def swap() -> None:
            self._settings = dataclasses.replace(self._settings, target_model=target.path)
            for name in names:
                self._methods[name].swap(methods[name])
                self._metrics.serves(self._methods[name].info)

        return swap

    def _load(self, path: str, on_trial: OnTrial | None) -> DraftMethodInfo:
        name, served = self._served(path)
        if self._between_rounds(lambda: served.num_kept) >= _MOST_VERSIONS:
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
                served.try_out(method, self._told(served, on_trial))
            return served.info

        info: DraftMethodInfo = self._between_rounds(swap)
        self._paths[name] = path
        return info

    def _told(self, served: VersionedMethod, on_trial: OnTrial) -> OnTrial:
        def decided(result: TrialResult) -> None:
            self._metrics.serves(served.info)
            on_trial(result)

        return decided

    def _served(self, path: str) -> tuple[str, VersionedMethod]:
        if not (Path(path) / "config.json").is_file():
            raise InvalidRequest(f"{path} is not a checkpoint folder (no config.json) here", param="path")
        name = recognise(path)
        if name not in self._methods:
            served = ", ".join(self._methods) or "none"
            raise InvalidRequest(f"it is a draft for {name}; methods with weights here: {served}", param="path")
        return name, self._methods[name]
