"""Driving a real VerifierEngine in this process: a tiny random Llama, its engine, sessions that wait for replies."""

from __future__ import annotations

import math
import queue
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry

from outrider.drafting.methods.interface import DraftMethod
from outrider.engine.attention.block_manager import BlockManager
from outrider.engine.certificate import Certificate
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.recurrent.states import RecurrentStates
from outrider.engine.run.runner import ModelRunner
from outrider.engine.sampling.laws import LogitsProcessor
from outrider.shared.messages import (
    AutoDrafts,
    Commit,
    FinishReason,
    HiddenStatesRequest,
    LastDraft,
    LocalDrafts,
    Proposal,
    SessionSpec,
    TokenLogprob,
    VerifyStep,
)
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.verifier_service.engine import VerifierEngine
from outrider.verifier_service.metrics import VerifierMetrics
from outrider.verifier_service.rounds import EngineLimits
from outrider.verifier_service.session import VerifierSession
from outrider.verifier_service.timing.step_costs import StepCosts
from tests.engine.tiny_models import save_tiny_model

REPLY_TIMEOUT_S = 60.0
VOCAB_SIZE = 61
EOS_ID = 2
# Proposes for a committed output; None: no proposal in this round.
Draft = Callable[[tuple[int, ...]], Proposal | None]


def save_llama(directory: Path, seed: int = 0, num_layers: int = 2, max_len: int = 256) -> Path:
    """Wide enough logits that greedy decoding has no near-ties, small enough to run in a millisecond."""
    config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_len,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
    }
    return save_tiny_model("LlamaConfig", config, directory, seed)


def save_hybrid(directory: Path, max_len: int = 256) -> Path:
    """A Qwen3.5 of the same vocabulary: recurrent layers before and after attention."""
    config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "max_position_embeddings": max_len,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
    }
    return save_tiny_model("Qwen3_5TextConfig", config, directory)


@dataclass
class EngineShape:
    num_blocks: int = 200
    block_size: int = 4
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    prefill_chunk_size: int = 128
    prefix_caching: bool = True
    num_slots: int = 40  # of recurrent states
    num_log_rows: int = 12
    rejection_sample_method: str = "standard"


@contextmanager
def running_engine(
    loaded: LoadedModel,
    certificate: Certificate,
    shape: EngineShape | None = None,
    local_methods: Mapping[str, DraftMethod] | None = None,
) -> Iterator[VerifierEngine]:
    """Started, and at the end proved to have leaked nothing. Slots of recurrent states that hold nothing are NaN."""
    shape = shape or EngineShape()
    states = loaded.make_states(shape.num_slots, shape.num_log_rows)
    engine = VerifierEngine(
        ModelRunner(loaded, loaded.make_cache(shape.num_blocks, shape.block_size), states),
        BlockManager(shape.num_blocks, shape.block_size, prefix_caching=shape.prefix_caching),
        EngineLimits(
            shape.max_num_seqs,
            shape.max_num_batched_tokens,
            shape.prefill_chunk_size,
            loaded.max_model_len,
            shape.rejection_sample_method,
        ),
        certificate,
        VerifierMetrics(CollectorRegistry()),
        StepCosts([(1, 0.001), (64, 0.01)]),
        local_methods,
    )
    if engine.states is not None and states is not None:
        engine.states._free = PoisonedSlots(states, engine.states._free)
    engine.start()
    try:
        yield engine
        engine.check_integrity()
        if engine.num_sessions == 0:
            assert engine.blocks.num_free_blocks == shape.num_blocks
            assert engine.states is None or engine.states.num_free_slots == shape.num_slots
    finally:
        engine.stop()


class PoisonedSlots(list[int]):
    """Free slots, filled with NaN."""

    def __init__(self, states: RecurrentStates, slots: Sequence[int]) -> None:
        super().__init__()
        self._states = states
        for slot in slots:
            self.append(slot)

    def append(self, slot: int) -> None:
        for layer in self._states.layers:
            for tensor in (layer.window, layer.state, layer.log):
                tensor[slot] = math.nan
        super().append(slot)


@dataclass
class Session:
    """One open session; `step` waits for its commits."""

    engine: VerifierEngine
    spec: SessionSpec
    replies: queue.Queue[Commit | Exception] = field(default_factory=queue.Queue)
    handle: int = -1

    def __enter__(self) -> Session:
        grammar = self.engine.compile_grammar(self.spec)
        self.handle = self.engine.open(self.spec, self.replies.put, grammar)
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close(self.handle)

    def step(
        self,
        base_len: int,
        proposal: Proposal | None = None,
        max_new_tokens: int = 0,
        epoch: int | None = None,
        hidden: HiddenStatesRequest | None = None,
        local: LocalDrafts | None = None,
        auto: AutoDrafts | None = None,
        last: LastDraft | None = None,
    ) -> list[Commit]:
        """The commits of one step; raises the error that came instead."""
        self.submit(base_len, proposal, max_new_tokens, epoch, hidden, local, auto, last)
        return self.collect()

    def submit(
        self,
        base_len: int,
        proposal: Proposal | None = None,
        max_new_tokens: int = 0,
        epoch: int | None = None,
        hidden: HiddenStatesRequest | None = None,
        local: LocalDrafts | None = None,
        auto: AutoDrafts | None = None,
        last: LastDraft | None = None,
    ) -> None:
        epoch = self.spec.epoch if epoch is None else epoch
        step = VerifyStep(epoch, base_len, proposal, max_new_tokens, hidden, local, auto, last)
        self.engine.submit(self.handle, step)

    def collect(self) -> list[Commit]:
        commits: list[Commit] = []
        while not commits or commits[-1].more:
            reply = self.replies.get(timeout=REPLY_TIMEOUT_S)
            if isinstance(reply, Exception):
                raise reply
            commits.append(reply)
        return commits


def make_spec(
    prompt: Sequence[int],
    params: SamplingParams,
    mode: SpeculationMode = SpeculationMode.EXACT,
    *,
    committed: Sequence[int] = (),
    epoch: int = 1,
    stream_key: int = 99,
    cache_salt: str = "",
) -> SessionSpec:
    return SessionSpec(
        session_id="s",
        epoch=epoch,
        prompt_token_ids=tuple(prompt),
        committed_token_ids=tuple(committed),
        sampling_params=params,
        mode=mode,
        stream_key=stream_key,
        cache_salt=cache_salt,
    )


def generate(
    engine: VerifierEngine,
    spec: SessionSpec,
    draft: Draft | None = None,
    free_run: int = 0,
    local: LocalDrafts | None = None,
) -> list[Commit]:
    """A whole session, round by round, until its finish reason; checks that the commits join up."""
    commits: list[Commit] = []
    output = spec.committed_token_ids
    with Session(engine, spec) as session:
        while not commits or commits[-1].finish_reason is None:
            proposal = draft(output) if draft else None
            for commit in session.step(len(output), proposal, 0 if proposal else free_run, local=local):
                assert commit.base_len == len(output)
                assert len(commit.origins) == len(commit.token_ids) > 0
                assert commit.num_accepted_tokens <= min(commit.num_draft_tokens, len(commit.token_ids))
                output += commit.token_ids
                commits.append(commit)
    assert all(commit.finish_reason is None for commit in commits[:-1])
    return commits


def plain_decoding(loaded: LoadedModel, certificate: Certificate) -> Callable[[str, int], list[Commit]]:
    """(name in PARAMS, seed of the prompt) -> the commits of plain decoding, one token a forward, alone, without any
    cache: what everything must equal."""
    known: dict[tuple[str, int], list[Commit]] = {}

    def plain(name: str, prompt_seed: int) -> list[Commit]:
        if (name, prompt_seed) not in known:
            with running_engine(loaded, certificate, EngineShape(prefix_caching=False)) as engine:
                known[name, prompt_seed] = generate(engine, make_spec(prompt_of(prompt_seed), PARAMS[name]))
        return known[name, prompt_seed]

    return plain


def tokens_of(commits: Sequence[Commit]) -> tuple[int, ...]:
    return tuple(token for commit in commits for token in commit.token_ids)


def finish_of(commits: Sequence[Commit]) -> tuple[FinishReason | None, int | None]:
    return commits[-1].finish_reason, commits[-1].stop_token_id


NUM_TOKENS = 40
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=2),
    "greedy with penalties": SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.4
    ),
    "sampled": SamplingParams(
        temperature=0.7, top_p=0.9, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=0
    ),
    "hot": SamplingParams(
        temperature=1.3,
        top_k=40,
        seed=4,
        max_tokens=NUM_TOKENS,
        presence_penalty=0.5,
        bad_words=((7, 9), (5,)),
        min_tokens=20,
    ),
}


def prompt_of(seed: int, length: int = 37) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length))


PROMPT = prompt_of(0)


def logprobs_of(commits: Sequence[Commit]) -> list[TokenLogprob]:
    return [entry for commit in commits for entry in commit.logprobs]


def make_session(*, waits: bool = False, num_computed: int = 1) -> VerifierSession:
    """One of two prompt tokens that belongs to no engine; waits: it has asked for its next step."""
    params = SamplingParams(temperature=0.0)
    session = VerifierSession(
        spec=make_spec([1, 2], params),
        processor=LogitsProcessor(params, [1, 2], ()),
        on_reply=lambda _reply: None,
        opened_at=0.0,
        token_ids=[1, 2],
        num_computed=num_computed,
    )
    if waits:
        session.step = VerifyStep(1, 0)
    return session
