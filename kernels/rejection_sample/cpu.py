"""Each session's accepted draft tokens and next token, from logits: one compiled call, on all threads.

The rules of verifier_service/acceptance for chains and trees whose law is temperature, top-k, top-p and min-p alone
(row_laws/cpu). A unit is a session: the laws of rows that its decision does not reach are never computed.
Needs numba.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, njit
from numpy.typing import NDArray

from outrider.kernels.cpu import record
from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.row_laws.cpu import (
    CHUNK,
    doubles_at,
    find_maxima,
    floats_at,
    integers_at,
    keep,
    pick,
    pointer,
    race,
    race_kept,
    sum_chunk,
    total_of,
    weigh,
    weigh_kept,
)

# RACE, QUANTILE: go down to the child that equals the token drawn, by the shared noise or by a uniform number;
# STANDARD, BLOCK: verifier_service/acceptance/standard and block
RACE, QUANTILE, STANDARD, BLOCK = range(4)


class _CallFields(NamedTuple):
    logits: int  # address of float32 rows
    row_bytes: int
    vocab_size: int
    sessions: int  # address of _SessionFields
    scratch: int
    scratch_bytes: int  # of a thread


class _SessionFields(NamedTuple):
    """Addresses of int64 arrays unless noted; N nodes."""

    rule: int
    first_row: int  # of the committed prefix; node i has row first_row + 1 + i
    num_nodes: int
    parents: int  # [N]; -1: the committed prefix
    token_ids: int  # [N]
    key_words: int  # [1 + N, 2], by row; of RACE
    uniforms: int  # float64, used in turn; enough for the rule
    law_starts: int  # [N + 1]: the ranges of the nodes' laws; of STANDARD and BLOCK
    law_token_ids: int
    law_probs: int  # float64
    out: int  # [2 + N]: number of accepted nodes, final token, the accepted nodes
    top_k: int  # 0: off
    temperature: float
    top_p: float  # 1: off
    min_p: float  # 0: off


_CallRecord, _Call = record.record_types(_CallFields)
_SessionRecord, _Session = record.record_types(_SessionFields)


@dataclass(frozen=True)
class SessionDrafts:
    """One session's rows and draft. laws: of each node's draws, token ids and probabilities; for STANDARD and BLOCK.

    params: temperature, top-k, top-p, min-p. key_words: uint32 [1 + N, 2], of RACE. uniforms: float64, of the other
    rules: at least 2 N + 2.
    """

    rule: int
    first_row: int
    params: tuple[float, int, float, float]
    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()  # empty: a chain
    key_words: NDArray[np.uint32] | None = None
    uniforms: NDArray[np.float64] | None = None
    laws: tuple[tuple[NDArray[np.int64], NDArray[np.float64]], ...] = ()


@njit
def _weigh(logits, session, largest, maxima, weights, sums):  # type: ignore[no-untyped-def]
    if session.top_k > 0 or session.top_p < 1.0 or session.min_p > 0.0:
        kept = keep(
            logits, largest, maxima, session.temperature, session.top_k, session.top_p, session.min_p, weights, sums
        )
        weigh_kept(logits, kept, largest, session.temperature, weights, sums)
    else:
        weigh(logits, largest, session.temperature, weights, sums)


@njit
def _race(logits, session, maxima, weights, sums, row):  # type: ignore[no-untyped-def]
    largest = find_maxima(logits, maxima)
    words = integers_at(session.key_words + 16 * row, 2)
    low, high, ids = np.uint32(words[0]), np.uint32(words[1]), integers_at(session.key_words, 0)
    if session.top_k > 0 or session.top_p < 1.0 or session.min_p > 0.0:
        kept = keep(
            logits, largest, maxima, session.temperature, session.top_k, session.top_p, session.min_p, weights, sums
        )
        return race_kept(logits, kept, largest, session.temperature, ids, low, high)
    return race(logits, largest, maxima, session.temperature, ids, low, high)


@njit
def _walk(call, session, maxima, weights, sums):  # type: ignore[no-untyped-def]
    """RACE and QUANTILE."""
    parents, token_ids = (
        integers_at(session.parents, session.num_nodes),
        integers_at(session.token_ids, session.num_nodes),
    )
    out, uniforms = integers_at(session.out, 2 + session.num_nodes), doubles_at(session.uniforms, 1 + session.num_nodes)
    node, num_accepted = -1, 0
    while True:
        row = session.first_row + 1 + node
        logits = floats_at(call.logits + row * call.row_bytes, call.vocab_size)
        if session.rule == RACE:
            token = _race(logits, session, maxima, weights, sums, 1 + node)
        else:
            largest = find_maxima(logits, maxima)
            _weigh(logits, session, largest, maxima, weights, sums)
            token = pick(weights, sums, uniforms[num_accepted])
        child = node + 1
        while child < session.num_nodes and not (parents[child] == node and token_ids[child] == token):
            child += 1
        if child >= session.num_nodes:
            out[0], out[1] = num_accepted, token
            return
        out[2 + num_accepted] = child
        num_accepted += 1
        node = child


@njit
def _subtract(weights, sums, law_ids, law_probs, scale, total):  # type: ignore[no-untyped-def]
    """weights become max(scale * weights / total - law, 0) times total / scale."""
    for place in range(len(law_ids)):
        token = law_ids[place]
        excess = scale * weights[token] / total - law_probs[place]
        weights[token] = max(excess, 0.0) * total / scale
    for token in law_ids:
        sum_chunk(weights, sums, token // CHUNK)


@njit
def _chain(call, session, maxima, weights, sums, other_weights, other_sums):  # type: ignore[no-untyped-def]
    """STANDARD and BLOCK."""
    num_nodes = session.num_nodes
    token_ids, law_starts = integers_at(session.token_ids, num_nodes), integers_at(session.law_starts, num_nodes + 1)
    uniforms, out = doubles_at(session.uniforms, 2 * num_nodes + 2), integers_at(session.out, 2 + num_nodes)
    all_ids = integers_at(session.law_token_ids, law_starts[num_nodes])
    all_probs = doubles_at(session.law_probs, law_starts[num_nodes])
    joint, used, tau, is_found = 1.0, 0, 0, False
    for position in range(num_nodes + 1):
        logits = floats_at(call.logits + (session.first_row + position) * call.row_bytes, call.vocab_size)
        largest = find_maxima(logits, maxima)
        _weigh(logits, session, largest, maxima, weights, sums)
        total = total_of(sums)
        if not total > 0.0:
            break
        if position == num_nodes:
            passes = session.rule == STANDARD
            if not passes:
                passes = uniforms[used] < joint
                used += 1
            if passes:
                tau, is_found = position, True
                weights, sums, other_weights, other_sums = other_weights, other_sums, weights, sums
            break
        ids = all_ids[law_starts[position] : law_starts[position + 1]]
        probs = all_probs[law_starts[position] : law_starts[position + 1]]
        token = token_ids[position]
        target_prob, draft_prob = weights[token] / total, 0.0
        for place in range(len(ids)):
            if ids[place] == token:
                draft_prob = probs[place]
        if session.rule == STANDARD:
            is_accepted = uniforms[used] * draft_prob < target_prob
            used += 1
            if is_accepted:
                continue
        _subtract(weights, sums, ids, probs, joint, total)
        mass = total_of(sums) / total * joint
        if session.rule == STANDARD:
            is_chosen = True
        else:
            # Order matters: (mass + 1) - joint rounds mass away, which sometimes failed the test at position 0.
            needed = mass + (1.0 - joint)
            is_chosen = needed <= 0.0
            if not is_chosen:
                is_chosen = uniforms[used] < mass / needed
                used += 1
        if is_chosen:
            tau, is_found = position, True
            if not mass > 0.0:  # both laws are equal, up to rounding: the residual is the target itself
                _weigh(logits, session, largest, maxima, weights, sums)
            weights, sums, other_weights, other_sums = other_weights, other_sums, weights, sums
        if session.rule == STANDARD:
            break
        joint = min(1.0, joint * target_prob / draft_prob)
        if joint <= 0.0:
            break  # no later test can pass
    out[0] = tau
    for node in range(tau):
        out[2 + node] = node
    out[1] = pick(other_weights, other_sums, uniforms[used]) if is_found else -1


@njit
def _decide(address, unit, thread):  # type: ignore[no-untyped-def]
    call = carray(address, 1, _Call)[0]
    session = carray(pointer(call.sessions), unit + 1, _Session)[unit]
    scratch, size = call.scratch + thread * call.scratch_bytes, call.vocab_size
    num_chunks = (size + CHUNK - 1) // CHUNK
    weights, other_weights = doubles_at(scratch, size), doubles_at(scratch + 8 * size, size)
    rest = scratch + 16 * size
    sums, other_sums = doubles_at(rest, num_chunks), doubles_at(rest + 8 * num_chunks, num_chunks)
    maxima = floats_at(rest + 16 * num_chunks, num_chunks)
    if session.rule == STANDARD or session.rule == BLOCK:
        _chain(call, session, maxima, weights, sums, other_weights, other_sums)
    else:
        _walk(call, session, maxima, weights, sums)


def accept_sessions(
    logits: torch.Tensor, sessions: list[SessionDrafts], num_threads: int
) -> list[tuple[tuple[int, ...], int]]:
    """Returns each session's accepted nodes and the token after them; -1: a row has no finite logit.

    logits: float32 [R, V]. Raises KernelArgumentError.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise KernelArgumentError(f"logits must be float32 [rows, vocab], not {logits.dtype} {list(logits.shape)}")
    num_rows, vocab_size = logits.shape
    kept: list[Any] = []
    outs = [np.array([0, -1, *session.token_ids], np.int64) for session in sessions]
    records = (_SessionRecord * len(sessions))(
        *(_describe(session, out, num_rows, vocab_size, kept) for session, out in zip(sessions, outs, strict=True))
    )
    num_chunks = -(-vocab_size // CHUNK)
    scratch_bytes = -(-(16 * (vocab_size + num_chunks) + 4 * num_chunks) // 4096) * 4096
    threads = max(1, min(num_threads, len(sessions)))
    call = _CallRecord(
        logits.data_ptr(), 4 * logits.stride(0), vocab_size, ctypes.addressof(records),
        cpu_team.scratch(scratch_bytes, threads), scratch_bytes,
    )  # fmt: skip
    work = cpu_team.Work(_decide, call, (), (logits,), len(sessions), threads, keeps=(records, kept, outs))
    cpu_team.run(work)
    return [(tuple(out[2 : 2 + out[0]].tolist()), int(out[1])) for out in outs]


def _describe(session: SessionDrafts, out: NDArray[np.int64], num_rows: int, vocab_size: int, kept: list[Any]) -> Any:
    """The session's record, checked; `kept` gets what it points to."""
    num_nodes, (temperature, top_k, top_p, min_p) = len(session.token_ids), session.params
    if not 0 <= session.first_row <= num_rows - 1 - num_nodes:
        raise KernelArgumentError(f"row {session.first_row} and {num_nodes} nodes of {num_rows} rows of logits")
    if not temperature > 0.0:
        raise KernelArgumentError(f"temperature {temperature} is not above 0")

    def place(values: Any, dtype: Any) -> int:
        array = np.ascontiguousarray(values, dtype)
        kept.append(array)
        return int(array.ctypes.data)

    law_starts = np.cumsum([0, *(len(ids) for ids, _ in session.laws)])
    ids = np.concatenate([ids for ids, _ in session.laws]) if session.laws else np.empty(0, np.int64)
    if session.rule in (STANDARD, BLOCK) and len(session.laws) != num_nodes:
        raise KernelArgumentError(f"{num_nodes} drafted tokens with {len(session.laws)} laws")
    for token_id, (law_ids, _) in zip(session.token_ids, session.laws, strict=False):
        if token_id not in law_ids:
            raise KernelArgumentError(f"token {token_id} has no mass in its own law")
    if len(ids) and not (0 <= ids.min() and ids.max() < vocab_size):
        raise KernelArgumentError(f"a law names a token outside [0, {vocab_size})")
    if session.rule == RACE:
        fits = session.key_words is not None and session.key_words.shape == (1 + num_nodes, 2)
    else:
        fits = session.uniforms is not None and len(session.uniforms) >= 2 * num_nodes + 2
    if not fits:
        raise KernelArgumentError("too few key words or uniform numbers")
    if any(not 0 <= token < vocab_size for token in session.token_ids):
        raise KernelArgumentError(f"a drafted token lies outside [0, {vocab_size})")
    kept.append(out)
    return _SessionRecord(
        rule=session.rule,
        first_row=session.first_row,
        num_nodes=num_nodes,
        parents=place(session.parents or range(-1, num_nodes - 1), np.int64),
        token_ids=place(session.token_ids, np.int64),
        key_words=place([] if session.key_words is None else session.key_words, np.int64),
        uniforms=place([] if session.uniforms is None else session.uniforms, np.float64),
        law_starts=place(law_starts, np.int64),
        law_token_ids=place(ids, np.int64),
        law_probs=place(np.concatenate([p for _, p in session.laws]) if session.laws else [], np.float64),
        out=out.ctypes.data,
        top_k=top_k,
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
    )
