"""The peer llama.cpp: `llama-server`, plain and with the same draft model, on GGUF files of the same bf16 weights.

Prompts and outputs are token ids: llama.cpp cannot split text as this family's tokenizer does. Its other settings are
its defaults, so its KV cache is f16 and caches finished prompts.
Not here: building llama-server. Build it on the measured machine (docs/benchmarks.md): prebuilt binaries lack AVX-512.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from tokenizers import Tokenizer

from benchmarks.gguf.export import export_gguf
from benchmarks.peer_transformers import PeerRun
from outrider.client.stack.processes import free_port
from outrider.shared.errors import ConfigError, OutriderError

# Without its type llama-server loads the draft model but decodes plainly.
DRAFT_OPTIONS = ("--spec-type", "draft-simple", "--spec-draft-n-max", "5", "--spec-draft-model")
VARIANTS = ("plain", "draft_model")
CONTEXT_LEN = 2048
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0


class PeerError(OutriderError):
    """llama-server did not start, or gave an unexpected answer."""


class LlamaServer:
    """One llama-server process with one stream, running within the `with` block. Its output goes to `log`."""

    def __init__(self, binary: Path, model: Path, draft: Path | None, log: Path) -> None:
        num_threads = str(len(os.sched_getaffinity(0)))
        port = free_port()
        self._log = log
        self._command = [
            *(str(binary), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
            *("--threads", num_threads, "--threads-batch", num_threads),
            *("--parallel", "1", "--ctx-size", str(CONTEXT_LEN)),
            *((*DRAFT_OPTIONS, str(draft)) if draft else ()),
        ]
        # One connection per request: llama-server closes idle ones, which httpx would notice only on the next use.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600, limits=limits)

    def __enter__(self) -> LlamaServer:
        with self._log.open("wb") as out:
            try:
                self._process = subprocess.Popen(self._command, stdout=out, stderr=subprocess.STDOUT)
            except OSError as error:
                raise ConfigError(f"--llama-server {self._command[0]}: {error.strerror}") from error
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def complete(self, prompt_ids: list[int], max_tokens: int) -> list[int]:
        """Greedy, streamed, never stopped early. Raises PeerError unless `max_tokens` tokens come.

        llama-server does not stream a token that ends within a character, only counts it: that raises too.
        """
        request = {
            "prompt": prompt_ids,
            "n_predict": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_tokens": True,
        }
        try:
            token_ids = self._stream(request)
        except httpx.TransportError as error:
            raise PeerError(f"llama-server disconnected; its log ends with: {self._last_words()}") from error
        if len(token_ids) != max_tokens:
            raise PeerError(f"llama-server streamed {len(token_ids)} of {max_tokens} tokens")
        return token_ids

    def _stream(self, request: dict[str, Any]) -> list[int]:
        token_ids: list[int] = []
        with self._client.stream("POST", "/completion", json=request) as response:
            if response.status_code != 200:
                raise PeerError(f"llama-server, HTTP {response.status_code}: {response.read().decode()}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    token_ids += json.loads(line[6:])["tokens"]
        return token_ids

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise PeerError(f"{' '.join(self._command)} did not start; its log ends with: {self._last_words()}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            return self._client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def _stop(self) -> None:
        self._client.close()
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class LlamaCppPeer:
    """One server per variant, both running as long as the peer: an idle one sleeps."""

    def __init__(self, binary: Path, target: str, draft: str) -> None:
        self._binary = binary
        self._target = Path(target)
        self._draft = Path(draft)
        self._tokenizer = Tokenizer.from_file(str(self._target / "tokenizer.json"))
        self._servers: dict[str, LlamaServer] = {}
        self._stack = ExitStack()

    def __enter__(self) -> LlamaCppPeer:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            target, draft = folder / "target.gguf", folder / "draft.gguf"
            export_gguf(self._target, target)
            export_gguf(self._draft, draft)
            for variant in VARIANTS:
                draft_file = draft if variant == "draft_model" else None
                server = LlamaServer(self._binary, target, draft_file, folder / f"{variant}.log")
                self._servers[variant] = stack.enter_context(server)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def run(self, variant: str, prompts: list[str], max_tokens: int) -> PeerRun:
        """One request after another, over HTTP."""
        prompt_ids = [self._tokenizer.encode(prompt).ids for prompt in prompts]
        started = time.perf_counter()
        outputs = [self._servers[variant].complete(ids, max_tokens) for ids in prompt_ids]
        seconds = time.perf_counter() - started
        return PeerRun(seconds, sum(map(len, outputs)), outputs)
