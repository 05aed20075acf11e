"""Chains of five tokens by an EAGLE-3 head of random weights for a Llama-8B, over 32,000 of its 128,256 tokens.

The drafter's own method at a context of 1,000, asked again and again for the proposal after the same committed tokens:
chains drawn on the device, and as they grow on the host, every row of logits copied there. The device's proposals are
also held against those without graphs. Races at temperature 1, and laws (rejection mode). Wall time between two
synchronisations, the first token's forward included.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from benchmarks.gpu_report.llamas import LLAMA_8B
from benchmarks.gpu_report.report import Finding, Part, Run, judged, noted
from benchmarks.gpu_report.timing import wall_us
from outrider.drafting.heads.decoder import DecoderConfig
from outrider.drafting.heads.eagle3 import Eagle3Config, Eagle3Head, default_feature_layers
from outrider.drafting.methods.eagle import EagleNet
from outrider.drafting.methods.growing import GrowingMethod
from outrider.drafting.methods.head_forward import HeadForward
from outrider.drafting.methods.paged_head import PagedHead
from outrider.drafting.session import DraftSession
from outrider.drafting.vocabulary.target_vocabulary import TargetVocabulary
from outrider.engine.attention.layer import ATTENTION_NAME
from outrider.engine.attention.ops import resolve_attention_ops
from outrider.engine.sampling.device_chains import DeviceChains
from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.shared.messages import DraftMethodInfo, DraftStep, HiddenStates, Proposal, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode

CONTEXT_LEN, NUM_TOKENS, BLOCK_SIZE = 1000, 5, 16
SESSION_COUNTS = (1, 8)
_DRAFT_VOCAB_SIZE = 32_000
_PARAMS = SamplingParams(temperature=1.0)
_MODES = {SpeculationMode.EXACT: "", SpeculationMode.REJECTION: ", laws"}


def random_head(target: LlamaConfig, draft_vocab_size: int, device: torch.device, dtype: torch.dtype) -> Eagle3Head:
    """A head of the target's sizes, of one layer; its tokens are spread evenly over the target's."""
    decoder = DecoderConfig(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
    )
    config = Eagle3Config(decoder, default_feature_layers(target.num_hidden_layers), draft_vocab_size)
    torch.manual_seed(0)
    with torch.device(device):
        embedding = torch.randn(target.vocab_size, target.hidden_size, dtype=dtype)
        d2t = torch.arange(draft_vocab_size) * (target.vocab_size // draft_vocab_size - 1)
        head = Eagle3Head(config, embedding=embedding, d2t=d2t, attn_implementation=ATTENTION_NAME)
    return head.to(dtype).eval().requires_grad_(False)


class HeadChains:
    """Sessions that have read a context each at a drafter's method over one head."""

    def __init__(
        self,
        head: Eagle3Head,
        num_sessions: int,
        device: torch.device,
        dtype: torch.dtype,
        context_len: int = CONTEXT_LEN,
    ) -> None:
        decoder = head.config.decoder
        bytes_per_row = 2 * decoder.num_key_value_heads * decoder.head_dim * dtype.itemsize
        # Three sides have the sessions' rows in the cache at once.
        num_rows = 3 * num_sessions * (context_len + NUM_TOKENS + BLOCK_SIZE)
        ops = resolve_attention_ops("triton", device)
        self._paged = PagedHead(
            head, ops, dtype, kv_cache_bytes=num_rows * bytes_per_row, block_size=BLOCK_SIZE, device=device
        )
        self._vocabulary = TargetVocabulary(decoder.vocab_size, head.target_ids)
        self._num_sessions = num_sessions
        self._context_len = context_len
        self._hidden_size = decoder.hidden_size

    def side(self, mode: SpeculationMode, *, draws: bool, graphs: bool = False) -> Side:
        """draws: on the device; else chains grow on the host."""
        forward = HeadForward(self._paged, self._vocabulary, graphs=graphs)
        chains = DeviceChains(forward) if draws else None
        net = EagleNet(self._paged, self._vocabulary, prefill_chunk_size=512, chains=chains)
        info = DraftMethodInfo("eagle3", max_num_draft_tokens=NUM_TOKENS, hidden_layers=net.hidden_layers)
        grammars = GrammarCompiler("", self._vocabulary.vocab_size, ())
        draw_chains = net.draw_chains if draws else None
        method = GrowingMethod(net, info, eos_token_ids=(), grammars=grammars, draw_chains=draw_chains)
        return Side(method, [self._session(method, info, place, mode) for place in range(self._num_sessions)])

    def _session(self, method: GrowingMethod, info: DraftMethodInfo, place: int, mode: SpeculationMode) -> DraftSession:
        drawn, layers, num_rows = self._vocabulary.vocab_size - 5, info.hidden_layers, self._context_len - 1
        prompt = tuple(5 + (31 * at + place) % drawn for at in range(self._context_len))
        session = DraftSession(SessionSpec("s", 1, prompt, (), _PARAMS, mode, place), list(prompt), lambda _reply: None)
        method.open(session)
        shape = (len(layers), num_rows, self._hidden_size)
        rows = np.random.default_rng(place).standard_normal(shape, dtype=np.float32)
        hidden = HiddenStates(-self._context_len, layers, num_rows, self._hidden_size, "float32", rows.tobytes())
        session.report(DraftStep(1, 0, (), NUM_TOKENS, hidden_states=(hidden,)))
        while method.advance(session):
            pass
        return session


class Side:
    """One way to draft; asked again it says the same."""

    def __init__(self, method: GrowingMethod, sessions: list[DraftSession]) -> None:
        self._method = method
        self._sessions = sessions

    def __call__(self) -> list[Proposal]:
        return self._method.propose(self._sessions)


def _measure(run: Run) -> Iterable[Finding]:
    head: Any = random_head(LLAMA_8B, _DRAFT_VOCAB_SIZE, run.device, torch.bfloat16)
    for num_sessions, (mode, suffix) in itertools.product(SESSION_COUNTS, _MODES.items()):
        chains = HeadChains(head, num_sessions, run.device, torch.bfloat16)
        sides = {"device": chains.side(mode, draws=True, graphs=True), "host": chains.side(mode, draws=False)}
        proposals = sides["device"]()
        num_tokens = sum(len(proposal.token_ids) for proposal in proposals)
        same = proposals == chains.side(mode, draws=True)() and num_tokens == num_sessions * NUM_TOKENS
        name = f"eagle-3 chains of {num_sessions} session{'s' if num_sessions > 1 else ''}{suffix}"
        yield judged(name, "the same without graphs", f"{num_tokens} tokens", same)
        times = wall_us(sides, 5 if run.quick else 20)
        each = {side: time / NUM_TOKENS / 1e3 for side, time in times.items()}
        yield noted(name, f"{each['device']:.2f} ms a token; by the host {each['host']:.2f} ms", **times)


PARTS = [Part("draft_head", "EAGLE-3 of random weights", 40.0, _measure)]
