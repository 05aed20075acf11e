"""Rejection sampling of chains on a GPU: the number of accepted tokens of each session, and the token after them.

Rules of verifier_service/acceptance: `standard`, `block`, and `point_mass` as `standard` with a one-token law (same
output law, one uniform per token instead of one draw). The host supplies all randomness: uniforms for the decisions,
and a key per session for the last token's exponential race. That key must come from the session's generator, never
from its coupled stream.

Draft laws are sparse, K tokens: the sum of (P * target - draft)+ over the vocabulary is P * (1 - target mass on K) plus
K terms. Launches: the rows' laws with masses (kernels/sampling_support: two passes, more where truncated); one program
per session that decides; the race over the one row per session from which the last token is drawn. Minimum traffic for
256 rows of 131,072 float32 logits in 64 sessions: 2 x 134 + 34 MB, 90 us at 3.35 TB/s, 63 us at 4.8 TB/s.

Not here: trees, which acceptance/tree.py decides on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from outrider.kernels.rejection_sample.drafts import ChainDrafts
from outrider.kernels.rejection_sample.triton_residual import CHUNK, combine_kernel, residual_race_kernel
from outrider.kernels.sampling_support.transforms import Transforms, check_logits, check_vector
from outrider.kernels.sampling_support.triton import RowLaws, row_laws
from outrider.kernels.sampling_support.triton_tiles import key_shift, probabilities


@dataclass(frozen=True)
class Decisions:
    """The accepted length of each session's draft, and the law that its next token is drawn from."""

    num_accepted: torch.Tensor  # int32 [S]
    final_rows: torch.Tensor  # int32 [S]; row that the next token is drawn from; -1: a session without rows
    factors: torch.Tensor  # float64 [S]; P_tau of the residual (P_tau * target - draft)+; -1: draw from the target
    # float64 [N], for tests: h_i of block or the acceptance probability of standard; unset after the last decision.
    hold_probs: torch.Tensor


def rejection_sample(
    logits: torch.Tensor, transforms: Transforms, drafts: ChainDrafts, uniforms: torch.Tensor, key_words: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """num_accepted int32 [S] and final token int64 [S]; -1 for a session without rows or without a finite logit.

    `logits` [N, V] and `transforms`: one row per root and draft token. `uniforms`: float64 [N] in [0, 1), one per
    decision in order (block needs one more than there are tokens). `key_words`: int32 [S, 2], 64 fresh random bits per
    session. Raises KernelArgumentError.
    """
    check_vector("key_words", key_words, torch.int32, (drafts.num_sessions, 2))
    laws = row_laws(logits, transforms, with_mass=True)
    decisions = decide(logits, laws, drafts, uniforms)
    return decisions.num_accepted, draw(logits, laws, drafts, decisions, key_words)


def decide(logits: torch.Tensor, laws: RowLaws, drafts: ChainDrafts, uniforms: torch.Tensor) -> Decisions:
    """Decides the accepted length of each session's draft. Raises KernelArgumentError."""
    check_logits(logits)
    num_rows, vocab_size = logits.shape
    drafts.check(num_rows)
    check_vector("uniforms", uniforms, torch.float64, (num_rows,))
    num_sessions, device = drafts.num_sessions, logits.device
    decisions = Decisions(
        num_accepted=torch.empty(num_sessions, dtype=torch.int32, device=device),
        final_rows=torch.empty(num_sessions, dtype=torch.int32, device=device),
        factors=torch.empty(num_sessions, dtype=torch.float64, device=device),
        hold_probs=torch.empty(num_rows, dtype=torch.float64, device=device),
    )
    law_width = drafts.law_token_ids.shape[1]
    if num_sessions:
        _decide_kernel[(num_sessions,)](
            logits,
            logits.stride(0),
            *laws,
            drafts.row_starts,
            drafts.token_ids,
            drafts.law_token_ids,
            drafts.law_counts,
            drafts.block_rules,
            uniforms,
            decisions.num_accepted,
            decisions.final_rows,
            decisions.factors,
            decisions.hold_probs,
            LAW_TOTAL=drafts.law_total,
            LAW_WIDTH=law_width,
            VOCAB_SIZE=vocab_size,
            KEY_SHIFT=key_shift(logits.dtype),
            BLOCK_LAW=max(16, triton.next_power_of_2(law_width)),
            num_warps=1,
        )
    return decisions


def draw(
    logits: torch.Tensor, laws: RowLaws, drafts: ChainDrafts, decisions: Decisions, key_words: torch.Tensor
) -> torch.Tensor:
    """int64 [S]: the token after each session's accepted ones."""
    vocab_size = logits.shape[1]
    num_sessions, num_chunks = drafts.num_sessions, triton.cdiv(vocab_size, CHUNK)
    # First the residual's winners, then the target's, used where the residual has no mass.
    values = torch.empty(2, num_sessions, num_chunks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(2, num_sessions, num_chunks, dtype=torch.int32, device=logits.device)
    final_tokens = torch.empty(num_sessions, dtype=torch.int64, device=logits.device)
    if num_sessions:
        residual_race_kernel[(num_sessions * num_chunks,)](
            logits,
            logits.stride(0),
            *laws,
            decisions.final_rows,
            decisions.factors,
            drafts.law_token_ids,
            drafts.law_counts,
            key_words,
            values,
            ids,
            num_sessions * num_chunks,
            LAW_TOTAL=drafts.law_total,
            LAW_WIDTH=drafts.law_token_ids.shape[1],
            VOCAB_SIZE=vocab_size,
            NUM_CHUNKS=num_chunks,
            KEY_SHIFT=key_shift(logits.dtype),
            BLOCK=min(CHUNK, max(16, triton.next_power_of_2(vocab_size))),
            num_warps=8,
        )
        combine_kernel[(num_sessions,)](
            values,
            ids,
            num_sessions * num_chunks,
            final_tokens,
            NUM_CHUNKS=num_chunks,
            BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
            num_warps=1,
        )
    return final_tokens


@triton.jit
def _decide_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    row_stride,
    largest_ptr,
    border_keys_ptr,
    border_ids_ptr,
    masses_ptr,
    scales_ptr,
    row_starts_ptr,
    token_ids_ptr,
    law_token_ids_ptr,
    law_counts_ptr,
    block_rules_ptr,
    uniforms_ptr,
    num_accepted_ptr,
    final_rows_ptr,
    factors_ptr,
    hold_probs_ptr,
    LAW_TOTAL: tl.constexpr,
    LAW_WIDTH: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    BLOCK_LAW: tl.constexpr,
):
    session = tl.program_id(0)
    first_row = tl.load(row_starts_ptr + session)
    num_tokens = tl.load(row_starts_ptr + session + 1) - first_row - 1
    is_block = tl.load(block_rules_ptr + session) != 0
    lanes = tl.arange(0, BLOCK_LAW)
    place = tl.full([], 0, tl.int32)
    tau = tl.full([], 0, tl.int32)
    # P_i of block; always 1 in standard.
    joint = tl.full([], 1.0, tl.float64)
    factor = tl.full([], -1.0, tl.float64)
    goes_on = num_tokens >= 0
    while (place < num_tokens) & goes_on:
        row = (first_row + place).to(tl.int64)
        row_ptr = logits_ptr + row * row_stride
        top = tl.load(largest_ptr + row)
        key = tl.load(border_keys_ptr + row)
        last_id = tl.load(border_ids_ptr + row)
        mass = tl.load(masses_ptr + row)
        scale = tl.load(scales_ptr + row)
        law_ptr = (row + 1) * LAW_WIDTH + lanes
        counts = tl.load(law_counts_ptr + law_ptr, mask=lanes < LAW_WIDTH, other=0)
        ids = tl.load(law_token_ids_ptr + law_ptr, mask=(lanes < LAW_WIDTH) & (counts > 0), other=-1)
        draft_probs = counts.to(tl.float64) / LAW_TOTAL
        target_probs = probabilities(row_ptr, ids, VOCAB_SIZE, top, key, last_id, mass, scale, KEY_SHIFT)
        token = tl.load(token_ids_ptr + row + 1).to(tl.int32)
        draft_prob = tl.sum(tl.where(ids == token, draft_probs, 0.0), axis=0)
        target_prob = tl.sum(tl.where(ids == token, target_probs, 0.0), axis=0)
        uniform = tl.load(uniforms_ptr + row)
        if is_block:
            excess = tl.sum(tl.maximum(joint * target_probs - draft_probs, 0.0), axis=0)
            excess += joint * tl.maximum(1.0 - tl.sum(target_probs, axis=0), 0.0)
            # Not (excess + 1) - joint, which would round excess away.
            weight = excess + (1.0 - joint)
            hold_prob = tl.where(weight > 0.0, excess / tl.where(weight > 0.0, weight, 1.0), 1.0)
            holds = (weight <= 0.0) | (uniform < hold_prob)
            tau = tl.where(holds, place, tau)
            factor = tl.where(holds, joint, factor)
            joint = tl.minimum(1.0, joint * target_prob / tl.where(draft_prob > 0.0, draft_prob, 1.0))
            goes_on = joint > 0.0
        else:
            hold_prob = tl.minimum(1.0, target_prob / tl.where(draft_prob > 0.0, draft_prob, 1.0))
            goes_on = uniform * draft_prob < target_prob
            tau = place
            factor = tl.full([], 1.0, tl.float64)
        tl.store(hold_probs_ptr + row, hold_prob)
        place += 1
    if goes_on:
        last_row = first_row + num_tokens
        tl.store(hold_probs_ptr + last_row, joint)
        holds = tl.load(uniforms_ptr + last_row) < joint
        tau = tl.where(holds, num_tokens, tau)
        factor = tl.where(holds, -1.0, factor)
    tl.store(num_accepted_ptr + session, tau)
    tl.store(final_rows_ptr + session, tl.where(num_tokens >= 0, first_row + tau, -1))
    tl.store(factors_ptr + session, factor)
