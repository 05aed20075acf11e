"""Writes the hidden states of ended sessions into a folder, so that a head is trained without a second pass.

`take` belongs to the engine's thread; files are written on a thread of its own. Not here: the files' layout
(drafting/recorded_states.py).
"""

from __future__ import annotations

import logging
import queue
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from outrider.drafting.recorded_states import RecordedSession, next_path, recorded_layers, write_states
from outrider.engine.model.weights_digest import weights_digest
from outrider.shared.errors import ConfigError
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.engine import VerifierEngine
from outrider.verifier_service.hidden_states import ReadRows
from outrider.verifier_service.learning.tap import may_learn_from
from outrider.verifier_service.session import VerifierSession

# positions; longest session that is recorded: copying it (30 MB at 4 layers of 896) must not hold up the others
_MOST_POSITIONS = 4096
# bytes; copied and not yet written: more is dropped, since the engine never waits for a disk
_WAITING_BYTES = 256 << 20
# bytes, and seconds since its first session; after either a file is written, so that a kill loses little
_FILE_BYTES, _FILE_S = 64 << 20, 20.0
_GIB = 1 << 30


def build_recorder(config: VerifierConfig, engine: VerifierEngine, log: logging.Logger) -> StatesRecorder:
    """Has the engine's ended sessions recorded. Raises ConfigError: the folder, or a target that is not deep enough."""
    folder, layers = Path(config.record_hidden_states), recorded_layers(engine.loaded.num_layers)
    if layers[0] < 0:
        raise ConfigError(
            f"--record-hidden-states: heads read three layers, and the target has {engine.loaded.num_layers}",
            param="record_hidden_states",
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the files have the texts
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--record-hidden-states: {error}", param="record_hidden_states") from error
    max_bytes = int(config.record_hidden_states_gb * _GIB)
    log.info("hidden states of layers %s are recorded in %s, with the texts", layers, folder)
    weights = weights_digest(Path(config.model))
    recorder = StatesRecorder(folder, layers, weights, max_bytes, engine.rounds.read_rows, log)
    engine.when_sessions_end(recorder.take, layers)
    return recorder


class StatesRecorder:
    """Records sessions that a head may be trained on (`may_learn_from`) until its files have `max_bytes`."""

    def __init__(
        self,
        folder: Path,
        layers: tuple[int, ...],
        weights: str,
        max_bytes: int,
        read_rows: ReadRows,
        log: logging.Logger,
    ) -> None:
        self._folder, self._layers, self._weights = folder, layers, weights
        self._left_bytes, self._read_rows, self._log = max_bytes, read_rows, log
        self._waiting: queue.Queue[RecordedSession | None] = queue.Queue()
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="states-recorder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Writes what is left."""
        self._waiting.put(None)
        self._thread.join()

    def take(self, session: VerifierSession) -> None:
        """Copies a session's tokens and rows. Call it while the session has its KV blocks."""
        is_wanted = 0 < session.num_computed <= _MOST_POSITIONS and session.num_computed > session.prompt_len
        if session.table is None or not is_wanted or not may_learn_from(session.spec) or self._left_bytes <= 0:
            return
        with self._lock:
            is_full = self._waiting_bytes > _WAITING_BYTES
        if is_full:
            self._log.warning("hidden states of a session are not recorded: the disk is slower than the engine")
            return
        [(first, rows)] = self._read_rows([(session, 0)], self._layers)
        if first > 0:  # a prefix from before the layers were kept
            return
        with self._lock:
            self._waiting_bytes += rows.nbytes
        self._waiting.put(RecordedSession(np.array(session.token_ids[: len(rows)], dtype=np.int32), rows))

    def _run(self) -> None:
        try:
            while self._record_one_file():
                pass
        except (OSError, SafetensorError) as error:
            self._left_bytes = 0
            self._log.error("hidden states are recorded no further: %s", error)

    def _record_one_file(self) -> bool:
        """Gathers sessions and writes them; False: that was all."""
        sessions: list[RecordedSession] = []
        num_bytes, until = 0, None
        while num_bytes < _FILE_BYTES:
            try:
                session = self._waiting.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if session is None:
                self._write(sessions, num_bytes)
                return False
            until = until or time.monotonic() + _FILE_S
            sessions.append(session)
            num_bytes += session.rows.nbytes
            with self._lock:
                self._waiting_bytes -= session.rows.nbytes
        self._write(sessions, num_bytes)
        return True

    def _write(self, sessions: Sequence[RecordedSession], num_bytes: int) -> None:
        if not sessions or self._left_bytes <= 0:
            return
        write_states(next_path(self._folder), sessions, self._layers, self._weights)
        self._left_bytes -= num_bytes
        if self._left_bytes <= 0:
            self._log.warning("hidden states are recorded no further: --record-hidden-states-gb is reached")
