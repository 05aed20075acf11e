"""What a learner is told on its standard input, read by a thread of its own so that its parent never waits for it.

A message is a line of JSON, and for a window `num_bytes` bytes of hidden states behind it:
    {"head": ..., "target": ..., ...}                                         Settings, first
    {"token_ids": [...], "first_counted": 3, "held_back": false, "num_bytes": 4096}
    {"outcome": "taken"}                                                      of the candidate in question
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

from outrider.training.learner.windows import Pool, Window

# share of the memory; for windows that no head is trained on: one session in ten is held back
HELD_BACK_SHARE = 0.1


@dataclass(frozen=True)
class Settings:
    """head: the folder that serves now. folder: where candidates are written, with those of an earlier process.

    share: CPU seconds per second. cycle_tokens: new output tokens before a cycle. dtype, hidden_size: of the rows.
    """

    head: Path
    target: Path
    folder: Path
    share: float
    cycle_tokens: int
    buffer_mb: int
    dtype: str
    hidden_size: int

    @classmethod
    def of(cls, message: dict[str, Any]) -> Settings:
        return cls(**message | {name: Path(message[name]) for name in ("head", "target", "folder")})


class Inbox:
    """Reads messages until the input ends; `outcomes` then has None."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.settings = Settings.of(json.loads(stream.readline()))
        memory, held_back = self.settings.buffer_mb << 20, HELD_BACK_SHARE
        self.trained_on = Pool(int((1 - held_back) * memory), seed=0)
        self.held_back = Pool(int(held_back * memory), seed=1)
        # Held by whoever reads or changes a pool.
        self.lock = threading.Lock()
        self.outcomes: queue.Queue[str | None] = queue.Queue()
        self.has_ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._read, name="learner-inbox", daemon=True).start()

    def _read(self) -> None:
        try:
            while line := self._stream.readline():
                message = json.loads(line)
                if "outcome" in message:
                    self.outcomes.put(message["outcome"])
                else:
                    self._keep(message, self._stream.read(message["num_bytes"]))
        finally:
            self.has_ended.set()
            self.outcomes.put(None)

    def _keep(self, message: dict[str, Any], data: bytes) -> None:
        token_ids = torch.tensor(message["token_ids"], dtype=torch.int64)
        flat = torch.frombuffer(bytearray(data), dtype=getattr(torch, self.settings.dtype))
        window = Window(token_ids, message["first_counted"], flat.view(len(token_ids), -1), self.settings.hidden_size)
        if not window.rows.isfinite().all():
            return  # kept as older text, they would spoil every later cycle
        with self.lock:
            (self.held_back if message["held_back"] else self.trained_on).add(window)
