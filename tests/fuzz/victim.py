"""The stack that is fuzzed, as processes, and a bystander that must notice nothing.

Not here: what is sent to it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx

from outrider.client.stack.commands import StackSettings, StackState
from outrider.client.stack.processes import Stack
from outrider.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.fuzz.tally import Finding
from tests.ports import server_port

MODELS = Path(__file__).parents[2] / "models"
_BODY: dict[str, Any] = {
    "prompt": "def add(a, b):\n    return a + b\n\n\ndef sub(",
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}
_TIMEOUT_S = 60.0


class Victim:
    def __init__(self, state: StackState, run_dir: Path) -> None:
        self.state = state
        self.run_dir = run_dir
        self.http = httpx.Client(base_url=state.url, timeout=_TIMEOUT_S)
        self._reference = self.stream()

    def stream(self) -> tuple[list[int], str]:
        """Token ids and text of one streamed request."""
        token_ids: list[int] = []
        text = ""
        with self.http.stream("POST", "/v1/completions", json=_BODY) as answer:
            if answer.status_code != 200:
                raise Finding(f"a normal request gets {answer.status_code}: {answer.read()[:300]!r}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    [choice] = json.loads(line[6:])["choices"]
                    token_ids += choice.get("token_ids") or ()
                    text += choice["text"]
        return token_ids, text

    def check(self) -> None:
        """Every process lives, none has logged a traceback, a normal request brings the bytes it brought before."""
        for name, pid in self.state.pids.items():
            try:
                os.kill(pid, 0)
            except OSError:
                raise Finding(f"{name} is dead") from None
        for log_file in self.run_dir.glob("*.log"):
            if "Traceback" in (text := log_file.read_text(errors="replace")):
                raise Finding(f"{log_file.name} has a traceback: {text[text.index('Traceback') :][:1000]}")
        if self.stream() != self._reference:
            raise Finding("a normal request brings other bytes than before")

    def check_nothing_is_held(self) -> None:
        """Sessions and KV blocks are free again soon after the last input."""
        deadline = time.monotonic() + _TIMEOUT_S
        while held := self._held():
            if time.monotonic() > deadline:
                raise Finding(f"still held: {held}")
            time.sleep(0.1)

    def _held(self) -> str:
        with grpc.insecure_channel(self.state.verifiers[0]) as channel:
            verifier = verifier_pb2_grpc.VerifierStub(channel).GetInfo(
                verifier_pb2.GetVerifierInfoRequest(), timeout=20
            )
        with grpc.insecure_channel(self.state.drafters[0]) as channel:
            drafter = drafter_pb2_grpc.DrafterStub(channel).GetInfo(drafter_pb2.GetDrafterInfoRequest(), timeout=20)
        used = verifier.num_blocks - verifier.num_free_blocks
        if verifier.num_sessions or drafter.num_sessions or used:
            return f"{verifier.num_sessions} sessions and {used} blocks, {drafter.num_sessions} draft sessions"
        return ""


class Bystander(threading.Thread):
    """Streams the same request again and again while others send nonsense; its bytes must stay what they were."""

    def __init__(self, victim: Victim) -> None:
        super().__init__(daemon=True)
        self.num_streams = 0
        self.problem = ""
        self._victim = Victim(victim.state, victim.run_dir)
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            try:
                self._victim.check()
            except Exception as error:
                self.problem = f"the bystander: {type(error).__name__}: {error}"
                return
            self.num_streams += 1
            self._over.wait(0.5)

    def stop(self) -> None:
        self._over.set()
        self.join()
        self._victim.http.close()


@contextmanager
def running_victim(run_dir: Path) -> Iterator[Victim]:
    settings = StackSettings(
        model=str(MODELS / "demo-target"),
        draft_model=str(MODELS / "demo-draft"),
        methods=("draft_model", "ngram"),
        port=0,
        grpc_port=server_port(),
    )
    stack = Stack(settings, run_dir, lambda _message: None, in_foreground=True)
    try:
        victim = Victim(stack.start(), run_dir)
        with closing(victim.http):
            yield victim
    finally:
        stack.stop()
