"""Makes one session's commit from its logits: acceptance, stops, origins, log-probabilities. No I/O, no KV."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.engine.sampling.laws import LogWeights, token_logprob
from outrider.shared.errors import InvalidRequest
from outrider.shared.messages import Commit, FinishReason, NextDraft, Proposal, Timings, TokenLogprob, TokenOrigin
from outrider.shared.sampling_params import SpeculationMode
from outrider.verifier_service.acceptance import block, coupled, point_mass, standard, tree
from outrider.verifier_service.acceptance.outcome import ROOT, Acceptance, agreed_path, children_of
from outrider.verifier_service.row_outputs import RowOutputs
from outrider.verifier_service.scheduler import Work
from outrider.verifier_service.session import VerifierSession

# vLLM's name (rejection_sample_method) -> acceptance rule
CHAIN_RULES = {"standard": standard.accept, "block": block.accept}


@dataclass(frozen=True)
class ForwardTimes:
    """The times of the forward behind a round's logits: perf_counter seconds, and the rates reported with its commits.

    num_sessions: in the forward. open_sessions: at the verifier. prompts_s: of the forward, for reading prompts.
    plain_round_s: what a round without drafts takes; 0: not known.
    """

    started: float
    ended: float
    num_sessions: int = 1
    open_sessions: int = 0
    prompts_s: float = 0.0
    plain_round_s: float = 0.0


@dataclass(frozen=True)
class Round:
    """A commit, and the accepted draft nodes, in order, whose KV rows stay."""

    commit: Commit
    kept_nodes: tuple[int, ...]


def decide(
    work: Work, outputs: RowOutputs, max_model_len: int, times: ForwardTimes, next_draft: NextDraft | None = None
) -> Round:
    """Decides one session's round. Raises ArithmeticError for a row without a finite logit.

    outputs: 1 + nodes rows; row 0 follows the last committed token, row 1 + i follows node i. next_draft: for the
    session's next step, if this commit ends the one in progress.
    """
    session = work.session
    proposal = work.proposal or Proposal(base_len=session.committed_len, token_ids=(), method="")
    acceptance = _accept(session, proposal, outputs)
    if acceptance.final_token < 0:
        raise ArithmeticError("a row has no finite logit: no token can be drawn")
    token_ids = [*(proposal.token_ids[node] for node in acceptance.accepted_nodes), acceptance.final_token]
    count, finish_reason, stop_token_id = _stop(session, token_ids, max_model_len, outputs.logits.shape[1])
    num_accepted = min(count, len(acceptance.accepted_nodes))
    rows = [ROOT, *acceptance.accepted_nodes]
    params = session.spec.sampling_params
    logprobs: tuple[TokenLogprob, ...] = ()
    if params.num_logprobs is not None:
        logprobs = tuple(
            token_logprob(
                outputs.logits[rows[index] + 1], token_ids[index], params.num_logprobs, params.logprob_token_ids
            )
            for index in range(count)
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
            open_sessions=times.open_sessions,
            draft_us=max(1, _us(drafted.seconds)) if drafted is not None else 0,
        ),
        more=step_goes_on,
        num_cached_tokens=0 if session.has_replied else session.num_cached_tokens,
        prompt_logprobs=() if session.has_replied else tuple(session.prompt_logprobs),
        local_drafts=drafted.asked if drafted is not None else None,
        next_draft=None if step_goes_on or finish_reason is not None else next_draft,
        saved_us=_saved_us(session, times, count),
    )
    return Round(commit, acceptance.accepted_nodes[:num_accepted])


def _saved_us(session: VerifierSession, times: ForwardTimes, num_tokens: int) -> int:
    """Returns the microseconds saved over plain decoding of the tokens; 0: not known, as in a first round."""
    if not times.plain_round_s or session.committed_at is None:
        return 0
    took_s = times.ended - session.committed_at - times.prompts_s
    return int(1e6 * (num_tokens * times.plain_round_s - took_s))


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
        try:
            return session.processor.log_weights(logits[node + 1], output + path[::-1])
        except InvalidRequest:
            if node == ROOT:
                raise
            return _certain(0, logits.shape[1])  # the output ends at this node (_stop), whatever is drawn after it

    if session.spec.mode is SpeculationMode.EXACT:
        return coupled.accept(law_at, proposal, stream_key=session.spec.stream_key)
    rng = acceptance_rng(session.spec.stream_key, session.spec.epoch, proposal.base_len)
    if not proposal.laws:
        return point_mass.accept(law_at, proposal, rng=rng)
    if proposal.parents:
        return tree.accept(law_at, proposal, rng=rng)
    return CHAIN_RULES[session.chain_rule](law_at, proposal, rng=rng)


def _accept_drawn(proposal: Proposal, drawn: NDArray[np.int64]) -> Acceptance:
    """The `coupled` rule with tokens already drawn. At temperature 0 without logit edits these are argmaxes, and no law
    is built (4 us instead of 300).
    """
    return agreed_path(proposal, lambda node, _: int(drawn[node + 1]))


def _certain(token_id: int, vocab_size: int) -> LogWeights:
    """The law of one token."""
    weights = np.full(vocab_size, -np.inf)
    weights[token_id] = 0.0
    return weights


def acceptance_rng(stream_key: int, epoch: int, base_len: int) -> np.random.Generator:
    """Randomness of one round in rejection mode: the same for a repeated step, independent of other streams."""
    seed = np.random.SeedSequence([stream_key, epoch, base_len, 0xACCE97])
    return np.random.Generator(np.random.Philox(seed))


def _origins(proposal: Proposal, acceptance: Acceptance) -> tuple[TokenOrigin, ...]:
    if not proposal.token_ids:
        return (TokenOrigin.TARGET,)
    last = acceptance.accepted_nodes[-1] if acceptance.accepted_nodes else ROOT
    final = TokenOrigin.CORRECTED if children_of(proposal).get(last) else TokenOrigin.BONUS
    return (*(TokenOrigin.ACCEPTED for _ in acceptance.accepted_nodes), final)


def _stop(
    session: VerifierSession, token_ids: list[int], max_model_len: int, vocab_size: int
) -> tuple[int, FinishReason | None, int | None]:
    """Number of tokens to emit; finish reason and stop token, if the session ends there."""
    params, permitted = session.spec.sampling_params, session.processor.permitted
    output = session.output_token_ids if permitted.can_run_out else []
    for count, token in enumerate(token_ids, 1):
        length = session.committed_len + count
        if token in permitted.stop_ids:
            # A requested stop token is the stop reason, the model's own end token is not (null), as in vLLM.
            return count, FinishReason.STOP, token if token in params.stop_token_ids else None
        if length >= params.max_tokens or session.prompt_len + length >= max_model_len:
            return count, FinishReason.LENGTH, None
        if permitted.can_run_out and permitted.is_dead_end([*output, *token_ids[:count]], vocab_size):
            return count, FinishReason.ABORT, None
    return len(token_ids), None, None


def _us(seconds: float) -> int:
    return max(0, int(seconds * 1e6))
