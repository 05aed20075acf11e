"""New weights for draft methods that serve: read beside what the process does, and swapped in between rounds."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from outrider.drafting.checkpoints.recognise import recognise
from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.registry import build_heads, build_methods, plan_methods
from outrider.drafting.serving.several import SeveralHeads
from outrider.drafting.serving.versions import TrialResult, VersionedMethod
from outrider.drafting.settings import MethodSettings
from outrider.drafting.warm_up import warm_up
from outrider.engine.model.loaded import LoadedModel
from outrider.shared.draft_policy.named_drafts import NamedDraft
from outrider.shared.errors import ConfigError, InvalidRequest, Overloaded
from outrider.shared.messages import DraftMethodInfo
from outrider.shared.telemetry import MetricsOf

# versions of a method that only open sessions still have; each has a cache of its own, as those that new ones get
_MOST_OLDER = 2

OnTrial = Callable[[TrialResult], None]
Salt = Callable[[], str]


def no_salt() -> str:
    """The weights are for all sessions."""
    return ""


class DraftVersionMetrics:
    """What was loaded, and which version serves."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = MetricsOf(registry)
        self._version = make.gauge("draft_version", "Version of a method's weights; 1: the first.", ("method",))
        self._loads = make.counter("draft_loads", "Loads of weights for drafting, by outcome.", ("outcome",))

    def serves(self, method: str, info: DraftMethodInfo) -> None:
        """method: its name, for one of several heads METHOD/HEAD."""
        self._version.labels(method).set(info.version)

    def count_load(self, outcome: str) -> None:
        """outcome: taken or refused."""
        self._loads.labels(outcome).inc()


def require_cpu(device: torch.device, option: str) -> None:
    """Raises ConfigError for `option` on a GPU, whose graphs are captured while no other thread uses it."""
    if device.type != "cpu":
        raise ConfigError(f"--{option}: only on the CPU, not on {device}", param=option.replace("-", "_"))


def warm(method: DraftMethod, log: logging.Logger, *, versions: bool) -> DraftMethod:
    """Makes a few proposals with a method that has weights. versions: whether others may take their place."""
    if not method.info.model:
        return method
    started = time.perf_counter()
    warm_up(method)
    took_s = time.perf_counter() - started
    log.info("drafting with %s %s (warm in %.1f s)", method.info.name, method.info.model, took_s)
    return VersionedMethod(method) if versions else method


class DraftLoader:
    """Loads new weights for those of `methods` that have versions.

    settings: of all of them. between_rounds: calls what it is given on the engine's thread, and returns its result.
    loaded: returns the target that serves now, if it is in this process.
    """

    def __init__(
        self,
        settings: MethodSettings,
        methods: Mapping[str, DraftMethod],
        between_rounds: Callable[[Callable[[], Any]], Any],
        metrics: DraftVersionMetrics,
        log: logging.Logger,
        loaded: Callable[[], LoadedModel | None] = lambda: None,
    ) -> None:
        self._settings, self._log, self._metrics, self._loaded = settings, log, metrics, loaded
        self._between_rounds = between_rounds
        self._one_at_a_time = threading.Lock()
        # The checkpoint of each that has one, as loaded last.
        planned = plan_methods(settings.draft_model, settings.methods, settings.target_model)
        self._paths = {(kind, draft.name): draft.path for kind, drafts in planned.items() for draft in drafts}
        # By kind, and then by name where there are several heads.
        self._served: dict[str, dict[str, VersionedMethod]] = {}
        for kind, method in methods.items():
            heads = method.heads if isinstance(method, SeveralHeads) else {"": method}
            served = {name: head for name, head in heads.items() if isinstance(head, VersionedMethod)}
            if served:
                self._served[kind] = served
            for name, head in served.items():
                metrics.serves(_label(kind, name), head.info)

    def load(self, path: str, on_trial: OnTrial | None = None, salt: Salt = no_salt) -> DraftMethodInfo:
        """Reads and checks the weights on this thread, not the engine's; sessions opened from then on use them.

        on_trial: they are on trial first (versions.py), and it is called with the result, on the engine's thread. salt:
        returns the cache salt of the only sessions that they are for; called on the engine's thread once they are read.
        path: a folder, or for one of several heads NAME=FOLDER. Raises InvalidRequest for what cannot be used,
        Overloaded while another one is loaded or too many are in memory.
        """
        with self.alone():
            try:
                info = self._load(path, on_trial, salt)
            except Exception as error:
                self._log.warning("%s is not taken for drafting: %s", path, error)
                self._metrics.count_load("refused")
                if isinstance(error, ConfigError):
                    raise InvalidRequest(error.message, param="path") from error
                raise
        self._metrics.count_load("taken")
        self._log.info("drafting with %s %s from now on, version %d", info.name, info.model, info.version)
        return info

    def forget(self, salt: str) -> None:
        """Frees the weights that are for the sessions with this salt alone; on the engine's thread."""
        for heads in self._served.values():
            for method in heads.values():
                method.forget(salt)

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
        names = tuple(name for name in self._served if name != "draft_model")
        if not names:
            return lambda: None
        folders = (str(NamedDraft(head, path)) for (kind, head), path in self._paths.items() if kind in names)
        settings = dataclasses.replace(
            self._settings, target_model=target.path, draft_model=tuple(folders), methods=names
        )
        try:
            built = build_heads(settings, self._log.info, target)
        except ConfigError as error:
            raise InvalidRequest(f"{target.path}: {error.message}", param="path") from error
        for heads in built.values():
            for method in heads.values():
                warm_up(method)

        def swap() -> None:
            self._settings = dataclasses.replace(self._settings, target_model=target.path)
            for name, heads in built.items():
                for head, method in heads.items():
                    self._served[name][head].swap(method)
                    self._metrics.serves(_label(name, head), self._served[name][head].info)

        return swap

    def _load(self, path: str, on_trial: OnTrial | None, salt: Salt) -> DraftMethodInfo:
        draft = NamedDraft.of(path)
        name, served = self._place_of(draft)
        label = _label(name, draft.name)
        if self._between_rounds(lambda: served.num_older) >= _MOST_OLDER:
            raise Overloaded(f"sessions still use {_MOST_OLDER} older versions of {label}; try again later")
        settings = dataclasses.replace(self._settings, draft_model=(draft.path,), methods=(name,))
        method = build_methods(settings, self._log.info, self._loaded())[name]
        own = dataclasses.replace(served.info, model=method.info.model, version=method.info.version)
        if method.info != own:
            raise InvalidRequest(f"its shape is {method.info}, the served draft's is {own}", param="path")
        warm_up(method)

        def swap() -> DraftMethodInfo:
            if on_trial is not None:
                return served.try_out(method, self._told(label, served, on_trial), salt())
            served.swap(method)
            return served.info

        info: DraftMethodInfo = self._between_rounds(swap)
        self._metrics.serves(label, served.info)
        self._paths[name, draft.name] = draft.path
        return info

    def _told(self, label: str, served: VersionedMethod, on_trial: OnTrial) -> OnTrial:
        def decided(result: TrialResult) -> None:
            self._metrics.serves(label, served.info)
            on_trial(result)

        return decided

    def _place_of(self, draft: NamedDraft) -> tuple[str, VersionedMethod]:
        """Returns the kind of the checkpoint, and the method or head that it is for. Raises InvalidRequest."""
        if not (Path(draft.path) / "config.json").is_file():
            raise InvalidRequest(f"{draft.path} is not a checkpoint folder (no config.json) here", param="path")
        kind = recognise(draft.path)
        heads = self._served.get(kind, {})
        if draft.name in heads:
            return kind, heads[draft.name]
        if not heads:
            served = ", ".join(self._served) or "none"
            raise InvalidRequest(f"it is a draft for {kind}; methods with weights here: {served}", param="path")
        if "" in heads:
            raise InvalidRequest(f"there is one {kind} here: give its folder without a name", param="path")
        names = ", ".join(heads)
        raise InvalidRequest(f"there are several {kind} here: give NAME=FOLDER, NAME one of {names}", param="path")


def _label(kind: str, head: str) -> str:
    return f"{kind}/{head}" if head else kind
