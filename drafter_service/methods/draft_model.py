"""A small language model drafts a chain (Leviathan et al. 2023): one forward per draft token for the whole batch.

Each session has its own paged KV. Draft tokens stay in the cache until the next commit; what the commit contradicts
is cut back, what it confirms is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from drafter_service.session import DraftSession
from engine.batch import SessionRows, build_batch
from engine.block_manager import BlockManager, BlockTable, OutOfBlocks
from engine.coupling import coupled_sample
from engine.grammar import GrammarCompiler
from engine.runner import ModelRunner
from engine.sampling import LogitsProcessor, LogWeights, probabilities
from shared.errors import InvalidRequest
from shared.messages import LAW_TOTAL, DraftMethodInfo, Proposal, SparseLaw
from shared.sampling_params import SpeculationMode

MAX_DRAFT_TOKENS = 16
# Tokens in a law on the wire: 160 bytes a token, at most one point of acceptance lost up to 1.6 nats of entropy.
LAW_SIZE = 32
# More committed tokens than this wait for `advance`, so that one long prompt does not hold up the others' drafts.
CATCH_UP_ROWS = 64


@dataclass
class _State:
    """`cached_ids` are the tokens whose KV stands in the cache, draft tokens included."""

    processor: LogitsProcessor
    table: BlockTable
    cached_ids: list[int] = field(default_factory=list)


@dataclass
class _Draft:
    """A proposal in the making."""

    session: DraftSession
    state: _State
    num_wanted: int
    rng: np.random.Generator
    token_ids: list[int] = field(default_factory=list)
    laws: list[SparseLaw] = field(default_factory=list)
    confidence: bytearray = field(default_factory=bytearray)


class DraftModelMethod:
    def __init__(self, runner: ModelRunner, blocks: BlockManager, *, prefill_chunk_size: int, model_name: str) -> None:
        self._runner = runner
        self._blocks = blocks
        self._prefill_chunk_size = prefill_chunk_size
        loaded = runner.loaded
        self._grammars = GrammarCompiler(loaded.path, loaded.vocab_size, loaded.eos_token_ids)
        self._states: dict[int, _State] = {}
        self.info = DraftMethodInfo(
            name="draft_model",
            model=model_name,
            max_num_draft_tokens=MAX_DRAFT_TOKENS,
            max_model_len=runner.loaded.max_model_len,
            vocab_size=runner.loaded.vocab_size,
        )

    def open(self, session: DraftSession) -> None:
        spec = session.spec
        eos_token_ids = self._runner.loaded.eos_token_ids
        grammar = self._grammars.compile(spec.sampling_params.grammar) if spec.sampling_params.grammar else None
        table, num_cached = self._blocks.open(session.token_ids, spec.cache_salt)
        self._states[id(session)] = _State(
            processor=LogitsProcessor(spec.sampling_params, spec.prompt_token_ids, eos_token_ids, grammar),
            table=table,
            cached_ids=session.token_ids[:num_cached],
        )

    def advance(self, session: DraftSession) -> bool:
        state = self._states[id(session)]
        if len(session.token_ids) > self._runner.loaded.max_model_len:
            return False
        self._cut_back(session, state)
        if len(session.token_ids) - len(state.cached_ids) <= CATCH_UP_ROWS:
            return False
        start = len(state.cached_ids)
        chunk = session.token_ids[start : min(start + self._prefill_chunk_size, len(session.token_ids) - 1)]
        if not self._grow(state, start + len(chunk), spared=[state]):
            return False
        rows = SessionRows(chunk, start, state.table.block_ids, num_logits_rows=0)
        self._runner.forward(build_batch([rows], self._blocks.block_size, self._runner.loaded.device))
        state.cached_ids.extend(chunk)
        self._blocks.register(state.table, session.token_ids, len(state.cached_ids))
        return len(session.token_ids) - len(state.cached_ids) > CATCH_UP_ROWS

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        states = [self._states[id(session)] for session in sessions]
        drafts = [self._begin(session, states) for session in sessions]
        pending = {
            id(draft): draft.session.token_ids[len(draft.state.cached_ids) :] for draft in drafts if draft.num_wanted
        }
        while running := [draft for draft in drafts if len(draft.token_ids) < draft.num_wanted]:
            rows = [
                SessionRows(pending[id(draft)], len(draft.state.cached_ids), draft.state.table.block_ids, 1)
                for draft in running
            ]
            batch = build_batch(rows, self._blocks.block_size, self._runner.loaded.device)
            logits = self._runner.forward(batch).logits.numpy()
            for place, draft in enumerate(running):
                draft.state.cached_ids.extend(pending[id(draft)])
                try:
                    pending[id(draft)] = [self._choose(draft, logits[place])]
                except InvalidRequest:  # no law to draw from: the target will say so to its own session
                    draft.num_wanted = len(draft.token_ids)
        for draft in drafts:
            self._blocks.register(
                draft.state.table,
                draft.session.token_ids,
                min(len(draft.state.cached_ids), len(draft.session.token_ids)),
            )
        return [self._finish(draft) for draft in drafts]

    def close(self, session: DraftSession) -> None:
        state = self._states.pop(id(session), None)
        if state is not None:
            self._blocks.close(state.table)

    def _begin(self, session: DraftSession, batch: Sequence[_State]) -> _Draft:
        state = self._states[id(session)]
        self._cut_back(session, state)
        length = len(session.token_ids)
        wanted = min(session.step.num_draft_tokens if session.step else 0, MAX_DRAFT_TOKENS)
        wanted = min(wanted, self._runner.loaded.max_model_len - length)
        if wanted > 0 and not self._grow(state, length + wanted - 1, spared=batch):
            wanted = 0
        rng = _propose_rng(session.spec.stream_key, session.spec.epoch, session.committed_len)
        return _Draft(session, state, max(wanted, 0), rng)

    def _finish(self, draft: _Draft) -> Proposal:
        return Proposal(
            base_len=draft.session.committed_len,
            token_ids=tuple(draft.token_ids),
            method=self.info.name,
            laws=tuple(draft.laws),
            confidence=bytes(draft.confidence),
        )

    def _cut_back(self, session: DraftSession, state: _State) -> None:
        """Keeps the cache as far as it agrees with the committed tokens; the last of them is always computed again."""
        limit = min(len(state.cached_ids), len(session.token_ids) - 1)
        agreed = next((place for place in range(limit) if state.cached_ids[place] != session.token_ids[place]), limit)
        agreed = self._blocks.truncate(state.table, agreed)
        del state.cached_ids[agreed:]

    def _grow(self, state: _State, num_positions: int, *, spared: Sequence[_State]) -> bool:
        """Makes room, at the cost of the caches of sessions not `spared` if need be; those are only computed again."""
        while True:
            try:
                self._blocks.grow(state.table, num_positions)
                return True
            except OutOfBlocks:
                kept = {id(other) for other in spared}
                victim = next(
                    (other for other in self._states.values() if id(other) not in kept and other.table.block_ids), None
                )
                if victim is None:
                    return False
                self._blocks.truncate(victim.table, 0)
                victim.cached_ids.clear()

    def _choose(self, draft: _Draft, logits: NDArray[np.float32]) -> int:
        spec, state = draft.session.spec, draft.state
        if state.processor.is_plain_argmax:
            token = int(np.argmax(logits))
            confidence = 1.0 / float(np.exp(logits - logits[token]).sum())
        else:
            output = [*draft.session.output_token_ids, *draft.token_ids]
            log_weights = state.processor.log_weights(logits, output)
            if spec.mode is SpeculationMode.EXACT:
                token = coupled_sample(log_weights, spec.stream_key, len(output))
                confidence = float(probabilities(log_weights)[token])
            else:
                law = sparse_law(log_weights)
                token = _draw(law, draft.rng)
                draft.laws.append(law)
                confidence = law.counts[law.token_ids.index(token)] / LAW_TOTAL
        draft.token_ids.append(token)
        draft.confidence.append(min(255, int(confidence * 256)))
        return token


def sparse_law(log_weights: LogWeights) -> SparseLaw:
    """The LAW_SIZE likeliest tokens, in integer counts that sum to LAW_TOTAL; this is the law to sample from."""
    probs = probabilities(log_weights)
    token_ids = np.argsort(-probs, kind="stable")[:LAW_SIZE]
    shares = probs[token_ids] / probs[token_ids].sum() * LAW_TOTAL
    counts = np.floor(shares).astype(np.int64)
    counts[0] += LAW_TOTAL - counts.sum()
    kept = counts > 0
    return SparseLaw(tuple(token_ids[kept].tolist()), tuple(counts[kept].tolist()))


def _draw(law: SparseLaw, rng: np.random.Generator) -> int:
    place = np.searchsorted(np.cumsum(law.counts), rng.integers(LAW_TOTAL), side="right")
    return law.token_ids[int(place)]


def _propose_rng(stream_key: int, epoch: int, base_len: int) -> np.random.Generator:
    """Randomness of one proposal in rejection mode; no other stream shares it.

    A generator per session would start anew when the session is opened again (another drafter took over), and its
    drafts would then depend on the tokens that the same numbers have led to already: no longer the target's law.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([stream_key, epoch, base_len, 0xD4AF7])))
