"""A target with a known law over 33 tokens, its tokenizer, and a draft method that guesses it.

The logits of a position are a row of a fixed table, chosen by a checksum of the whole prefix: one wrong, lost or
repeated token changes all that follow. The target reads its prefix from a paged cache that holds the token ids
themselves, so a wrong block table or a stale slot changes the output too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import tokenizers
import torch
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from outrider.drafting.session import DraftSession
from outrider.engine.attention.batch import ForwardBatch
from outrider.engine.run.runner import ForwardResult
from outrider.engine.sampling.coupling import coupled_sample
from outrider.engine.sampling.grammar import GrammarState, _source
from outrider.engine.sampling.laws import LogitsProcessor
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.messages import DraftMethodInfo, Proposal
from outrider.shared.sampling_params import Grammar, SamplingParams

EOS_ID = 0
MAX_MODEL_LEN = 128
MODEL = "toy"
# Two of these are halves of "é", which a text may be cut within.
_LIKELY = ("<eos>", "a", "b", "c", "d", "e", "Ġ", "ab", "cd", "Ċ", ".", "!", "Ã", "©", "x", "ba")
# Drawn only where a grammar leaves nothing else: the text of a tool call, whose markers are several tokens.
_CALLS = ("<", "tool", "_call", ">", "/", '{"', "{", "}", '"', '":', ":", ",", "name", "arg", "rg", "uments", "f")
_TOKENS = (*_LIKELY, *_CALLS)
VOCAB_SIZE = len(_TOKENS)
_NUM_ROWS = 4099


def _table(seed: int, mean: float, num_tokens: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(mean, 2.0, (_NUM_ROWS, num_tokens)).astype(np.float32)


_TABLE = np.concatenate([_table(7, 0.0, len(_LIKELY)), _table(8, -200.0, len(_CALLS))], axis=1)
_TABLE[:, EOS_ID] -= 2.0
_CHAT_TEMPLATE = "{% if tools %}a{% endif %}{{ messages[0].content }}"


def logits_after(token_ids: Sequence[int]) -> NDArray[np.float32]:
    """The law."""
    checksum = 1
    for token_id in token_ids:
        checksum = (checksum * 31 + token_id + 1) % _NUM_ROWS
    return _TABLE[checksum]


def undisturbed(
    prompt: Sequence[int], params: SamplingParams, stream_key: int, grammar: GrammarState | None = None
) -> list[int]:
    """The output, drawn position by position: what every answer must be."""
    output: list[int] = []
    processor = LogitsProcessor(params, prompt, (EOS_ID,), grammar)
    while len(output) < min(params.max_tokens, MAX_MODEL_LEN - len(prompt)):
        logits = logits_after([*prompt, *output])
        if params.greedy:
            allowed = True if grammar is None else grammar.allowed(output)
            token_id = int(np.argmax(np.where(allowed, logits, -np.inf)))
        else:
            token_id = coupled_sample(processor.log_weights(logits, output), stream_key, len(output))
        output.append(token_id)
        if token_id == EOS_ID:
            break
    return output


def make_tokenizer() -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(_TOKENS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("c", "d"), ("b", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, {"eos_token": "<eos>"}, _CHAT_TEMPLATE)


def text_of(token_ids: Sequence[int], stop: Sequence[str]) -> str:
    """The text of a whole output: bytes joined, cut before the stop string that is complete first."""
    spelled = {"Ġ": b" ", "Ċ": b"\n", "Ã": b"\xc3", "©": b"\xa9", "<eos>": b""}
    data = b""
    for token_id in token_ids:
        data += spelled.get(_TOKENS[token_id], _TOKENS[token_id].encode())
        found = [data.decode("utf-8", "replace").find(text) for text in stop]
        if any(place >= 0 for place in found):
            return data.decode("utf-8", "replace")[: min(place for place in found if place >= 0)]
    return data.decode("utf-8", "replace")


TOKENIZER = make_tokenizer()


class ToyGrammars:
    """engine.sampling.grammar.GrammarCompiler without its child process and its limits on CPU time."""

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(TOKENIZER._backend.to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS_ID])

    @functools.lru_cache(maxsize=16)  # noqa: B019 - there is one
    def _compiled(self, source: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def compile(self, grammar: Grammar) -> GrammarState:
        matcher = self._compiled(_source(grammar)).deep_copy()
        return GrammarState(matcher, VOCAB_SIZE, lambda token: self._tokenizer.decode_bytes([token]), lambda: 0.0)


GRAMMARS = ToyGrammars()


class ToyCache:
    """The paged cache: per slot the token whose keys and values would be there; -1: never written."""

    def __init__(self, num_slots: int) -> None:
        self.tokens = np.full(num_slots, -1, dtype=np.int64)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self.tokens[targets.numpy()] = self.tokens[sources.numpy()]


class ToyRunner:
    """What the verifier's engine uses of engine.run.runner.ModelRunner."""

    states = None

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.cache = ToyCache(num_blocks * block_size)
        self._block_size = block_size
        self.loaded: Any = SimpleNamespace(
            path="toy",
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS_ID,),
            hidden_size=1,
            num_layers=1,
            max_model_len=MAX_MODEL_LEN,
            dtype=torch.float32,
            device=torch.device("cpu"),
            attention_ops=SimpleNamespace(row_backend="numba"),
        )

    def forward(
        self, batch: ForwardBatch, tap_layers: Sequence[int] = (), on_start: Callable[[], None] = lambda: None
    ) -> ForwardResult:
        on_start()
        tokens, slots = batch.token_ids.numpy(), batch.slot_mapping.numpy()
        self.cache.tokens[slots] = tokens
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        trees, parents = batch.tree_starts.tolist(), batch.parents.tolist()
        rows: dict[int, NDArray[np.float32]] = {}
        wanted = set(batch.logits_rows.tolist())
        for session, context_len in enumerate(contexts):
            cached = self._read(batch.block_tables[session].numpy(), context_len)
            first, end = starts[session], starts[session + 1]
            prefixes: list[list[int]] = []
            for row in range(first, end):
                index = row - first
                before = cached if index == 0 else prefixes[index - 1 if index < trees[session] else parents[row]]
                prefixes.append([*before, int(tokens[row])])
                if row in wanted:
                    rows[row] = logits_after(prefixes[-1])
        logits = np.array([rows[row] for row in batch.logits_rows.tolist()], np.float32).reshape(-1, VOCAB_SIZE)
        return ForwardResult(torch.from_numpy(logits), {})

    def _read(self, block_ids: NDArray[np.int32], length: int) -> list[int]:
        indices = np.arange(length)
        slots = block_ids[indices // self._block_size].astype(np.int64) * self._block_size
        return list(map(int, self.cache.tokens[slots + indices % self._block_size]))


class GuessingMethod:
    """drafting.methods.interface.DraftMethod: the likeliest tokens of the law, some of them wrong on purpose, which
    depends on the prefix and on `version`: fleets hold heads of several versions, and a stream that moves between them
    has rounds of other lengths.
    """

    grammars: Any = GRAMMARS

    def __init__(self, version: int = 0) -> None:
        self.info = DraftMethodInfo("draft_model", max_num_draft_tokens=8)
        self._version = version
        self._open: set[int] = set()

    @property
    def num_sessions(self) -> int:
        return len(self._open)

    def open(self, session: DraftSession) -> None:
        self._open.add(id(session))

    def advance(self, session: DraftSession) -> bool:
        return False

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        return [self._propose(session) for session in sessions]

    def close(self, session: DraftSession) -> None:
        self._open.discard(id(session))

    def _propose(self, session: DraftSession) -> Proposal:
        step = session.step
        prefix, drafted = list(session.token_ids), []
        num_prompt = len(prefix) - len(session.output_token_ids)
        for _ in range(min(step.num_draft_tokens, 8) if step is not None else 0):
            logits = logits_after(prefix)
            is_wrong = (int(1000 * abs(float(logits[3]))) + self._version) % 5 == 0
            if session.grammar is not None:
                allowed = session.grammar.allowed(prefix[num_prompt:])
                if not allowed.any():
                    break
                logits = np.where(allowed, logits, -np.inf)
            drafted.append(int(np.argsort(-logits)[int(is_wrong)]))
            prefix.append(drafted[-1])
        return Proposal(base_len=session.committed_len, token_ids=tuple(drafted), method=self.info.name)
