"""A chain of five tokens by a Llama-1B of random weights at a context of 1,000, drawn at temperature 1.

Two sides on the same weights and noise: drawn on the device, a CUDA graph a step and one copy at the end; and as chains
grow elsewhere, each row of logits copied to the host and its race run there, or its law made there. The device's chain
is also held against itself without graphs. Wall time between two synchronisations, the first token's forward included.

Not here: chains of trained heads (draft_head).
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_report.llamas import LLAMA_1B, load_made, random_llama, streamed_bytes
from benchmarks.gpu_report.report import Finding, Part, Run, judged, noted
from benchmarks.gpu_report.timing import copy_bandwidth, wall_us
from outrider.drafting.growth.laws import sparse_law
from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from outrider.engine.sampling.chains import ChainDraws, ChainStart, DrawnToken, ModelForward
from outrider.engine.sampling.coupling import coupled_sample, index_key
from outrider.engine.sampling.device_chains import DeviceChains
from outrider.engine.sampling.laws import LogitsProcessor, Row
from outrider.shared.messages import LAW_TOTAL
from outrider.shared.sampling_params import SamplingParams

CONTEXT_LEN, NUM_TOKENS, BLOCK_SIZE = 1000, 5, 16
SESSION_COUNTS = (1, 8)
_PARAMS = SamplingParams(temperature=1.0)


class Chains:
    """Sessions that have read a context each, and the two ways to draw what follows."""

    def __init__(self, loaded: LoadedModel, num_sessions: int, *, graphs: bool, has_laws: bool = False) -> None:
        """has_laws: tokens are drawn from the laws that go with them (rejection mode), else they win races."""
        self._blocks_each = -(-(CONTEXT_LEN + NUM_TOKENS) // BLOCK_SIZE)
        cache = loaded.make_cache(num_sessions * self._blocks_each, BLOCK_SIZE)
        self._runner = ModelRunner(loaded, cache, graphs=graphs)
        self._device_chains = DeviceChains(ModelForward(self._runner))
        self._sessions = range(num_sessions)
        self._has_laws = has_laws
        self._processor = LogitsProcessor(_PARAMS, (), ())
        drawn = loaded.vocab_size - 5
        ids = [[5 + (31 * place + session) % drawn for place in range(CONTEXT_LEN)] for session in self._sessions]
        for session in self._sessions:
            rows = SessionRows(ids[session][:-1], 0, self._blocks(session), 0)
            self._runner.forward(build_batch([rows], BLOCK_SIZE))
        self._last_ids = [context[-1] for context in ids]

    def by_device(self) -> list[list[DrawnToken]]:
        logits = self._forward(self._last_ids, CONTEXT_LEN - 1)
        starts = [ChainStart(CONTEXT_LEN, self._blocks(session), self._draws(session)) for session in self._sessions]
        return self._device_chains.draw(logits, starts)

    def by_host(self) -> list[list[int]]:
        chains: list[list[int]] = [[] for _ in self._sessions]
        token_ids = self._last_ids
        for place in range(NUM_TOKENS):
            rows = self._forward(token_ids, CONTEXT_LEN - 1 + place).float().cpu().numpy()
            token_ids = [self._token(row, session, place) for session, row in enumerate(rows)]
            for chain, token_id in zip(chains, token_ids, strict=True):
                chain.append(token_id)
        return chains

    def _token(self, row: Row, session: int, place: int) -> int:
        log_weights = self._processor.log_weights(row, ())
        law_places = self._draws(session).law_places
        if law_places is None:
            return coupled_sample(log_weights, session, place)
        law = sparse_law(log_weights)
        return law.token_ids[int(np.count_nonzero(np.cumsum(law.counts) <= law_places[place]))]

    def _draws(self, session: int) -> ChainDraws:
        keys = np.array([index_key(session, place) for place in range(NUM_TOKENS)]).astype(np.uint32)
        law_places = np.random.default_rng(session).integers(LAW_TOTAL, size=NUM_TOKENS)
        return ChainDraws(_PARAMS, keys, law_places if self._has_laws else None)

    def _forward(self, token_ids: list[int], position: int) -> torch.Tensor:
        rows = [SessionRows([token_ids[session]], position, self._blocks(session), 1) for session in self._sessions]
        return self._runner.forward(build_batch(rows, BLOCK_SIZE)).logits

    def _blocks(self, session: int) -> list[int]:
        return list(range(session * self._blocks_each, (session + 1) * self._blocks_each))


def _measure(run: Run) -> Iterable[Finding]:
    stream_us = streamed_bytes(LLAMA_1B) / copy_bandwidth() * 1e6
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_made(Path(folder), LLAMA_1B, random_llama, run.device)
        for num_sessions, has_laws in itertools.product(SESSION_COUNTS, (False, True)):
            chains, plain = (Chains(loaded, num_sessions, graphs=graphs, has_laws=has_laws) for graphs in (True, False))
            name = f"chains of {num_sessions} session{'s' if num_sessions > 1 else ''}{', laws' if has_laws else ''}"
            drawn = chains.by_device()
            same = drawn == plain.by_device()
            yield judged(name, "the same without graphs", f"{sum(map(len, drawn))} tokens", same)
            times = wall_us({"device": chains.by_device, "host": chains.by_host}, 5 if run.quick else 20)
            each = times["device"] / NUM_TOKENS
            measured = (
                f"{each / 1e3:.2f} ms a token, {each / stream_us:.2f} x the {stream_us / 1e3:.2f} ms of its weights"
            )
            yield noted(name, f"{measured}; by the host {times['host'] / NUM_TOKENS / 1e3:.2f} ms", **times)


PARTS = [Part("draft", "Llama-1B of random weights", 40.0, _measure)]
