"""The verifier's side of a learner: starts its process, feeds it, and tries out the heads that it makes.

The process makes one head for all sessions, or one for each salt that has a place (places.py): it knows their numbers.
The process may die, hang or send nonsense: serving goes on with the head that it has. Not here: training and the
judgement before a trial (training/learner), the trial itself (drafting/serving/versions).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.drafting.methods.registry import plan_methods
from outrider.drafting.serving.loading import DraftLoader, no_salt
from outrider.drafting.serving.versions import TrialResult
from outrider.shared.errors import ConfigError, OutriderError
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.engine import VerifierEngine
from outrider.verifier_service.learning.places import SaltPlaces, num_places_in
from outrider.verifier_service.learning.record import LearningRecord
from outrider.verifier_service.learning.tap import Tap

# Kinds of heads that can be trained further (training.heads.options.TRAINED_FURTHER; no import across services).
_LEARNING = ("eagle3", "dspark", "dflash", "medusa")
# starts; a process that has died so often is not started again
_MOST_STARTS = 4
# seconds; that the process gets to end by itself after its input has ended
_END_S = 5.0


def learned_head(config: VerifierConfig) -> tuple[str, str]:
    """Returns the method that learns and its folder. Raises ConfigError unless there is exactly one."""
    if importlib.util.find_spec("outrider.training") is None:
        raise ConfigError("--learn: outrider.training is not installed here", param="learn")
    plan = plan_methods(config.local_draft_model, config.local_methods, config.model, prefix="--local-")
    heads = [(name, draft.path) for name, drafts in plan.items() if name in _LEARNING for draft in drafts]
    if len(heads) != 1:
        found = " and ".join(f"{name} {path}" for name, path in heads) or "none"
        raise ConfigError(
            f"--learn: needs one head that can be trained further ({', '.join(_LEARNING)}), there is {found}",
            param="learn",
        )
    return heads[0]


def build_learner(
    config: VerifierConfig, engine: VerifierEngine, loader: DraftLoader, record: LearningRecord, log: logging.Logger
) -> Learner:
    """Builds the learner of a verifier's own head, and has its engine's sessions tapped. Raises ConfigError."""
    name, head = learned_head(config)
    if config.learn_checkpoints:
        try:
            Path(config.learn_checkpoints).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--learn-checkpoints: {error}", param="learn_checkpoints") from error
    loaded = engine.loaded
    layers = tuple(dict.fromkeys((*engine.draft_methods[name].info.hidden_layers, loaded.num_layers)))
    places, buffer_mb = None, config.learn_buffer_mb
    if config.learn == "per-salt":
        row_bytes = len(layers) * loaded.hidden_size * loaded.dtype.itemsize
        num_places = num_places_in(buffer_mb << 20, row_bytes, config.learn_cycle_tokens)
        places, buffer_mb = SaltPlaces(num_places, config.learn_cycle_tokens), buffer_mb // num_places
        log.info(
            "learner: %d salts may have a head of their own, each with %d MiB of text and %d MiB of cache",
            *(num_places, buffer_mb, config.local_kv_cache_mb),
        )
    settings = LearnerSettings(
        head=head,
        target=config.model,
        folder=config.learn_checkpoints,
        share=config.learn_share,
        cycle_tokens=config.learn_cycle_tokens,
        buffer_mb=buffer_mb,
        dtype=str(loaded.dtype).removeprefix("torch."),
        hidden_size=loaded.hidden_size,
    )
    log.info("learner: %s is trained further on what is served, with %.0f %% of a core", head, 100 * config.learn_share)
    tap = Tap(layers, engine.rounds.read_rows, record.count_tokens, places)
    engine.when_sessions_end(tap.take, layers)
    return Learner(settings, tap, loader, record, log, places)


@dataclass(frozen=True)
class LearnerSettings:
    """head, target: folders. folder: where versions are kept; "": nowhere, they go with the process.

    share: CPU seconds per second. cycle_tokens: new output tokens before each head that is judged. buffer_mb: for the
    text of each head. dtype, hidden_size: of the hidden states.
    """

    head: str
    target: str
    folder: str
    share: float
    cycle_tokens: int
    buffer_mb: int
    dtype: str
    hidden_size: int


@dataclass
class Learner:
    """A learner of one head, or of one for each salt that has one of `places`.

    `start` and `stop` are the verifier's; the rest runs on two threads of its own, but for the ends of trials and the
    loss of places, which come on the engine's.
    """

    settings: LearnerSettings
    tap: Tap
    loader: DraftLoader
    record: LearningRecord
    log: logging.Logger
    places: SaltPlaces | None = None
    command: tuple[str, ...] = (sys.executable, "-m", "outrider.training.learner")
    # For the process: what became of heads, and places that were lost.
    _news: queue.Queue[dict[str, Any]] = field(default_factory=queue.Queue)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _process: subprocess.Popen[bytes] | None = None
    _thread: threading.Thread | None = None
    # By place: the folder of the learned head that serves; of one on trial, if it stands it.
    _served: dict[int, str] = field(default_factory=dict)

    def start(self) -> None:
        if self.places is not None:
            self.places.on_lost = self._lose
            self.record.watch_salts(self.places.__len__, self._served.__len__)
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the process. Call it while the engine runs, which a version that is being loaded waits for."""
        self._stopping.set()
        if self._thread is None:
            return
        self._thread.join(timeout=_END_S)
        if self._thread.is_alive() and self._process is not None:  # it does not read its input
            self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="outrider-learner-") as scratch:
            folder = Path(self.settings.folder or scratch)
            for _ in range(_MOST_STARTS):
                if not self._serve_process(folder):
                    return
                self.log.warning("the learner's process has ended; drafting goes on with the head that it has")
            self.log.error("the learner has ended %d times and is not started again", _MOST_STARTS)

    def _serve_process(self, folder: Path) -> bool:
        """Starts the process and feeds it until it ends. Returns whether it is worth another start."""
        process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._process = process
        reader = _Reports(process, self._take_report)
        reader.start()
        try:
            self._feed(process, folder)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            _end(process)
            reader.join()
            if process.stdout is not None:
                process.stdout.close()
        return not (self._stopping.is_set() or reader.is_over)

    def _feed(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        served = list(self._served.copy().items())
        _send(process, dataclasses.asdict(self.settings) | {"served": served, "folder": str(folder)})
        while not self._stopping.is_set() and process.poll() is None:
            while not self._news.empty():
                _send(process, self._news.get())
            try:
                window = self.tap.windows.get(timeout=0.2)
            except queue.Empty:
                continue
            if self.places is not None and window.place not in self.places:
                continue  # it was lost, and the process has been told or will be behind this
            data = window.rows.contiguous().view(torch.uint8).numpy().tobytes()
            message = {
                "token_ids": window.token_ids,
                "first_counted": window.first_counted,
                "held_back": window.is_held_back,
                "place": window.place,
                "num_bytes": len(data),
            }
            _send(process, message, data)

    def _take_report(self, report: dict[str, Any]) -> None:
        """Acts on a line of the process; called on the reports' thread."""
        if "after" in report:
            self.record.judged(report["before"], report["after"])
        if "refused" in report:
            self.log.info("learner: the head in training is not tried out: %s", report["refused"])
            self.record.count_head("refused", str(report["refused"]))
        elif "candidate" in report:
            self._try_out(str(report["candidate"]), int(report["place"]), report)

    def _lose(self, place: int, salt: str) -> None:
        self.loader.forget(salt)
        self._served.pop(place, None)
        self._news.put({"lost": place})

    def _try_out(self, folder: str, place: int, report: dict[str, Any]) -> None:
        def decided(result: TrialResult) -> None:
            outcome = "taken" if result.is_kept else "rolled_back"
            if result.is_kept:
                self._served[place] = folder
            self.log.info(
                "learner: %s is %s: %.2f draft tokens accepted a round, %.2f before",
                Path(folder).name,
                outcome,
                result.newest.mean,
                result.previous.mean,
            )
            self.record.count_head(outcome)
            self._news.put({"outcome": outcome, "candidate": folder})

        places = self.places
        salt = no_salt if places is None else lambda: places.salt_of(place)
        try:
            info = self.loader.load(folder, decided, salt)
        except OutriderError as error:
            self.log.warning("learner: %s cannot be used: %s", folder, error)
            self.record.count_head("refused", error.message)
            self._news.put({"outcome": "refused", "candidate": folder})
            return
        self.log.info(
            "learner: version %d is tried out: %.2f tokens a round expected, %.2f before, after %d tokens",
            *(info.version, _mean(report["after"]), _mean(report["before"]), report["num_tokens"]),
        )


class _Reports(threading.Thread):
    """Reads a learner's lines; one that cannot be read ends the process."""

    def __init__(self, process: subprocess.Popen[bytes], take: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(name="learner-reports", daemon=True)
        self._process, self._take = process, take
        # The process has said that it cannot learn here: another start would say the same.
        self.is_over = False

    def run(self) -> None:
        stream = self._process.stdout
        while stream is not None and (line := stream.readline()):
            try:
                report = json.loads(line)
                if not isinstance(report, dict):
                    raise ValueError(f"not an object: {line[:80]!r}")
                if "cannot" in report:
                    self.is_over = True
                    logging.getLogger(__name__).error("the learner cannot learn: %s", report["cannot"])
                else:
                    self._take(report)
            except Exception:
                logging.getLogger(__name__).exception("the learner is ended: a line of it could not be used")
                self._process.kill()


def _send(process: subprocess.Popen[bytes], message: dict[str, Any], data: bytes = b"") -> None:
    stream = process.stdin
    if stream is not None:
        stream.write(json.dumps(message).encode() + b"\n" + data)
        stream.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        if process.stdin is not None:
            process.stdin.close()
    except BrokenPipeError:
        pass
    try:
        process.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _mean(lengths: dict[str, float]) -> float:
    return sum(lengths.values()) / len(lengths)
