"""The peer llama.cpp: `llama-server`, plain and with the same draft model, on GGUF files of the same bf16 weights.

Prompts and outputs are token ids: llama.cpp cannot split text as this family's tokenizer does. Its other settings are
its defaults, so its KV cache is f16 and caches finished prompts.
Not here: building llama-server. Build it on the measured machine (docs/benchmarks.md): prebuilt binaries lack AVX-512.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from benchmarks.gguf.export import export_gguf
from benchmarks.peers.server_process import PeerError, ServerProcess
from benchmarks.peers.transformers import PeerRun
from outrider.client.stack.processes import free_port

# Without its type llama-server loads the draft model but decodes plainly.
DRAFT_OPTIONS = ("--spec-type", "draft-simple", "--spec-draft-n-max", "5", "--spec-draft-model")
VARIANTS = ("plain", "draft_model")
CONTEXT_LEN = 2048
START_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 600.0


def llama_server_command(
    program: Sequence[str], model: Path, port: int, *, num_slots: int, context_len: int
) -> list[str]:
    """A thread per core. program: llama-server's command, without options. context_len: tokens per slot."""
    num_threads = str(len(os.sched_getaffinity(0)))
    return [
        *(*program, "--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", num_threads, "--threads-batch", num_threads),
        *("--parallel", str(num_slots), "--ctx-size", str(num_slots * context_len)),
    ]


class LlamaServer(ServerProcess):
    """One llama-server process with one stream."""

    def __init__(self, binary: Path, model: Path, draft: Path | None, log: Path) -> None:
        port = free_port()
        command = llama_server_command([str(binary)], model, port, num_slots=1, context_len=CONTEXT_LEN)
        command += (*DRAFT_OPTIONS, str(draft)) if draft else ()
        super().__init__(command, port, log, option="--llama-server", start_timeout_s=START_TIMEOUT_S)

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
            raise PeerError(f"llama-server disconnected; its log ends with: {self.last_words()}") from error
        if len(token_ids) != max_tokens:
            raise PeerError(f"llama-server streamed {len(token_ids)} of {max_tokens} tokens")
        return token_ids

    def _stream(self, request: dict[str, Any]) -> list[int]:
        token_ids: list[int] = []
        # One connection per request: llama-server closes idle ones, which httpx would notice only on the next use.
        with httpx.stream("POST", f"{self.url}/completion", json=request, timeout=REQUEST_TIMEOUT_S) as response:
            if response.status_code != 200:
                raise PeerError(f"llama-server, HTTP {response.status_code}: {response.read().decode()}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    token_ids += json.loads(line[6:])["tokens"]
        return token_ids


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

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    def run(self, variant: str, prompts: list[str], max_tokens: int) -> PeerRun:
        """One request after another, over HTTP."""
        prompt_ids = [self._tokenizer.encode(prompt).ids for prompt in prompts]
        started = time.perf_counter()
        outputs = [self._servers[variant].complete(ids, max_tokens) for ids in prompt_ids]
        seconds = time.perf_counter() - started
        return PeerRun(seconds, sum(map(len, outputs)), outputs)
