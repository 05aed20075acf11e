"""From one session's logits to its commit: acceptance, stops, origins, log-probabilities. No I/O, no KV."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.sampling import LogWeights, token_logprob
from shared.messages import Commit, FinishReason, Proposal, Timings, TokenLogprob, TokenOrigin
from shared.sampling_params import SpeculationMode
from verifier_service.acceptance import block, coupled, point_mass, standard, tree
from verifier_service.acceptance.outcome import ROOT, Acceptance, children_of
from verifier_service.pace import NO_ROUND, LastRound
from verifier_service.row_outputs import RowOutputs
from verifier_service.scheduler import Work
from verifier_service.session import VerifierSession

# Prices of drafts that differ by no more than this share, or so many microseconds, are the same.
_SAME_PRICE, _SAME_PRICE_US = 0.05, 50
# vLLM's names for rejection_sample_method.
CHAIN_RULES = {"standard": standard.accept, "block": block.accept}


@dataclass(frozen=True)
class ForwardTimes:
    """perf_counter seconds of the forward that a round's logits came from, and the verifier's pace at that time."""

    started: float
    ended: float
    num_sessions: int = 1
    draft_rows_us: tuple[int, ...] = ()
    tokens_per_s: float = 0.0
    last_round: LastRound = NO_ROUND
    open_sessions: int = 0


@dataclass(frozen=True)
class Round:
    """A commit, and the accepted draft nodes whose KV rows are to be kept, in order."""

    commit: Commit
    kept_nodes: tuple[int, ...]


def decide(work: Work, outputs: RowOutputs, max_model_len: int, times: ForwardTimes) -> Round:
    """`outputs` of 1 + nodes rows: row 0 follows the last committed token, row 1 + i follows node i."""
    session = work.session
    proposal = work.proposal or Proposal(base_len=session.committed_len, token_ids=(), method="")
    acceptance = _accept(session, proposal, outputs)
    if acceptance.final_token < 0:
        raise ArithmeticError("a row of logits holds no number to draw by")
    token_ids = [*(proposal.token_ids[node] for node in acceptance.accepted_nodes), acceptance.final_token]
    count, finish_reason, stop_token_id = _stop(session, token_ids, max_model_len)
    num_accepted = min(count, len(acceptance.accepted_nodes))
    rows = [ROOT, *acceptance.accepted_nodes]
    num_logprobs = session.spec.sampling_params.num_logprobs
    logprobs: tuple[TokenLogprob, ...] = ()
    if num_logprobs is not None:
        logprobs = tuple(
            token_logprob(outputs.logits[rows[place] + 1], token_ids[place], num_logprobs) for place in range(count)
        )
    step_goes_on = finish_reason is None and session.free_run_left - count > 0
    drafted = session.local_draft
    now = time.perf_counter()
    commit = Commit(
        epoch=session.spec.epoch,
        base_len=session.committed_len,
        token_ids=tuple(token_ids[:count]),
        origins=_origins(proposal, acceptance)[:count],
        logprobs=logprobs,
        num_draft_tokens=len(proposal.token_ids),
        num_accepted_tokens=num_accepted,
        finish_reason=finish_reason,
        stop_token_id=stop_token_id,
        timings=Timings(
            queue_us=_us(times.started - session.step_arrived_at),
            forward_us=_us(times.ended - times.started),
            total_us=_us(now - session.step_arrived_at),
            sample_us=_us(now - times.ended),
            batch_sessions=times.num_sessions,
            tokens_per_s=times.tokens_per_s,
            round_tokens=times.last_round.num_tokens,
            round_us=_us(times.last_round.seconds),
            open_sessions=times.open_sessions,
            draft_us=max(1, _us(drafted.seconds)) if drafted is not None else 0,
            draft_depth=drafted.depth if drafted is not None else 0,
            draft_rows_us=_prices_to_tell(session, times.draft_rows_us),
        ),
        more=step_goes_on,
        num_cached_tokens=0 if session.has_replied else session.num_cached_tokens,
        prompt_logprobs=() if session.has_replied else tuple(session.prompt_logprobs),
        local_drafts=drafted.asked if drafted is not None else None,
    )
    return Round(commit, acceptance.accepted_nodes[:num_accepted])


def _prices_to_tell(session: VerifierSession, draft_rows_us: tuple[int, ...]) -> tuple[int, ...]:
    """Nothing while they are about what the session knows: told in every commit they were a tenth of plain decoding's
    bytes."""
    pairs = itertools.zip_longest(session.told_draft_rows_us, draft_rows_us, fillvalue=0)
    if all(abs(rows_us - told_us) <= max(_SAME_PRICE_US, _SAME_PRICE * told_us) for told_us, rows_us in pairs):
        return ()
    session.told_draft_rows_us = draft_rows_us
    return draft_rows_us


def _accept(session: VerifierSession, proposal: Proposal, outputs: RowOutputs) -> Acceptance:
    if outputs.acceptance is not None:
        return outputs.acceptance
    if outputs.token_ids is not None:
        return _accept_drawn(proposal, outputs.token_ids)
    logits = outputs.logits
    if session.processor.is_plain_argmax:
        return _accept_drawn(proposal, np.argmax(logits, axis=1))
    output = session.output_token_ids
    parents = proposal.parents or tuple(range(-1, len(proposal.token_ids) - 1))

    def law_at(node: int) -> LogWeights:
        path: list[int] = []
        ancestor = node
        while ancestor != ROOT:
            path.append(proposal.token_ids[ancestor])
            ancestor = parents[ancestor]
        return session.processor.log_weights(logits[node + 1], output + path[::-1])

    if session.spec.mode is SpeculationMode.EXACT:
        return coupled.accept(law_at, proposal, stream_key=session.spec.stream_key)
    rng = acceptance_rng(session.spec.stream_key, session.spec.epoch, proposal.base_len)
    if not proposal.laws:
        return point_mass.accept(law_at, proposal, rng=rng)
    if proposal.parents:
        return tree.accept(law_at, proposal, rng=rng)
    return CHAIN_RULES[session.chain_rule](law_at, proposal, rng=rng)


def _accept_drawn(proposal: Proposal, drawn: NDArray[np.int64]) -> Acceptance:
    """What `coupled` does with the tokens that it would draw. At temperature 0 with nothing to edit they are argmaxes,
    and no law need be built (4 us instead of 300)."""
    children = children_of(proposal) if proposal.token_ids else {}
    node = ROOT
    accepted: list[int] = []
    while True:
        token = int(drawn[node + 1])
        child = next((child for child in children.get(node, ()) if proposal.token_ids[child] == token), None)
        if child is None:
            return Acceptance(tuple(accepted), token)
        node = child
        accepted.append(child)


def acceptance_rng(stream_key: int, epoch: int, base_len: int) -> np.random.Generator:
    """Randomness of one round in rejection mode: a repeated step draws the same, no other stream shares it."""
    seed = np.random.SeedSequence([stream_key, epoch, base_len, 0xACCE97])
    return np.random.Generator(np.random.Philox(seed))


def _origins(proposal: Proposal, acceptance: Acceptance) -> tuple[TokenOrigin, ...]:
    if not proposal.token_ids:
        return (TokenOrigin.TARGET,)
    last = acceptance.accepted_nodes[-1] if acceptance.accepted_nodes else ROOT
    final = TokenOrigin.CORRECTED if children_of(proposal).get(last) else TokenOrigin.BONUS
    return (*(TokenOrigin.ACCEPTED for _ in acceptance.accepted_nodes), final)


def _stop(
    session: VerifierSession, token_ids: list[int], max_model_len: int
) -> tuple[int, FinishReason | None, int | None]:
    """How many of the tokens are emitted, and why the session ends there, if it does."""
    params = session.spec.sampling_params
    for place, token in enumerate(token_ids):
        length = session.committed_len + place + 1
        if token in session.stop_ids:
            # The model's own end is no stop *reason* (vLLM says null there), a token that was asked for is.
            return place + 1, FinishReason.STOP, token if token in params.stop_token_ids else None
        if length >= params.max_tokens or session.prompt_len + length >= max_model_len:
            return place + 1, FinishReason.LENGTH, None
    return len(token_ids), None, None


def _us(seconds: float) -> int:
    return max(0, int(seconds * 1e6))
