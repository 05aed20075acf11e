"""What a learner is told on its standard input, read by a thread of its own so that its parent never waits for it.

A message is a line of JSON, and for a window `num_bytes` bytes of hidden states behind it:
    {"head": ..., "target": ..., ...}                                         Settings, first
    {"token_ids": [...], "first_counted": 3, "held_back": false, "place": 0, "num_bytes": 4096}
    {"outcome": "taken", "candidate": "version-3"}                            what became of a candidate
    {"lost": 3}                                                               a place, with all that belongs to it
A place is a number of one head to train; where there is one for all, it is 0.
The end of the input is the end of the process: a learner does not outlive its verifier.
"""

from __future__ import annotations

import json
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from outrider.training.learner.windows import Texts, Window


@dataclass(frozen=True)
class Settings:
    """head: the folder that all begin with. folder: where candidates are written, with those of an earlier process.

    share: CPU seconds per second. cycle_tokens: new output tokens before a cycle. buffer_mb: of each place. dtype,
    hidden_size: of the rows. served: by place, the folder of the learned head that serves now.
    """

    head: Path
    target: Path
    folder: Path
    share: float
    cycle_tokens: int
    buffer_mb: int
    dtype: str
    hidden_size: int
    served: dict[int, Path]

    @classmethod
    def of(cls, message: dict[str, Any]) -> Settings:
        folders = {name: Path(message[name]) for name in ("head", "target", "folder")}
        return cls(**message | folders | {"served": {place: Path(folder) for place, folder in message["served"]}})


class Inbox:
    """Reads messages until the input ends."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.settings = Settings.of(json.loads(stream.readline()))
        # By place. The lock is held by whoever reads or changes them.
        self.texts: dict[int, Texts] = {}
        self.lock = threading.Lock()
        # (candidate's folder, outcome)
        self.outcomes: queue.Queue[tuple[str, str]] = queue.Queue()
        self.has_ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._read, name="learner-inbox", daemon=True).start()

    def _read(self) -> None:
        try:
            while line := self._stream.readline():
                message = json.loads(line)
                if "outcome" in message:
                    self.outcomes.put((message["candidate"], message["outcome"]))
                elif "lost" in message:
                    with self.lock:
                        self.texts.pop(message["lost"], None)
                else:
                    self._keep(message, self._stream.read(message["num_bytes"]))
        finally:
            self.has_ended.set()

    def _keep(self, message: dict[str, Any], data: bytes) -> None:
        token_ids = torch.tensor(message["token_ids"], dtype=torch.int64)
        flat = torch.frombuffer(bytearray(data), dtype=getattr(torch, self.settings.dtype))
        window = Window(token_ids, message["first_counted"], flat.view(len(token_ids), -1), self.settings.hidden_size)
        if not window.rows.isfinite().all():
            return  # kept as older text, they would spoil every later cycle
        with self.lock:
            texts = self.texts.setdefault(message["place"], Texts(self.settings.buffer_mb << 20))
            texts.add(window, is_held_back=message["held_back"])
