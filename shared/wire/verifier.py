"""The verifier's messages."""

from __future__ import annotations

from outrider.shared import messages as m
from outrider.shared.errors import InvalidRequest
from outrider.shared.wire.common import (
    hidden_from_wire,
    hidden_to_wire,
    logprob_to_wire,
    logprobs_from_wire,
    timings_from_wire,
    timings_to_wire,
)
from outrider.shared.wire.fields import from_message, same_fields, to_message
from outrider.shared.wire.proposals import proposal_from_wire, proposal_to_wire
from outrider.v1 import common_pb2 as common
from outrider.v1 import verifier_pb2 as verifier

# draft tokens, methods; most that `auto` may choose from: bounds what a hostile step can make the engine compute
MAX_DRAFT_TOKENS, MAX_OFFERS = 64, 32


def verify_step_to_wire(step: m.VerifyStep) -> verifier.VerifierRequest:
    return verifier.VerifierRequest(
        step=verifier.VerifyStep(
            epoch=step.epoch,
            base_len=step.base_len,
            proposal=proposal_to_wire(step.proposal) if step.proposal is not None else None,
            max_new_tokens=step.max_new_tokens,
            hidden_states=same_fields(verifier.HiddenStatesRequest, step.hidden_states),
            local_drafts=same_fields(verifier.LocalDrafts, step.local_drafts),
            auto_drafts=_auto_drafts_to_wire(step.auto_drafts) if step.auto_drafts is not None else None,
            last_draft=same_fields(verifier.LastDraft, step.last_draft),
        )
    )


def verify_step_from_wire(message: verifier.VerifyStep) -> m.VerifyStep:
    if message.base_len < 0 or message.max_new_tokens < 0:
        raise InvalidRequest("step: base_len and max_new_tokens must not be negative", param="base_len")
    return m.VerifyStep(
        epoch=message.epoch,
        base_len=message.base_len,
        proposal=proposal_from_wire(message.proposal) if message.HasField("proposal") else None,
        max_new_tokens=message.max_new_tokens,
        hidden_states=_hidden_request_from_wire(message.hidden_states) if message.HasField("hidden_states") else None,
        local_drafts=_local_drafts_from_wire(message.local_drafts) if message.HasField("local_drafts") else None,
        auto_drafts=_auto_drafts_from_wire(message.auto_drafts) if message.HasField("auto_drafts") else None,
        last_draft=_last_draft_from_wire(message.last_draft) if message.HasField("last_draft") else None,
    )


def _auto_drafts_to_wire(auto: m.AutoDrafts) -> verifier.AutoDrafts:
    return verifier.AutoDrafts(
        max_num_draft_tokens=auto.max_num_draft_tokens,
        token_tree=auto.token_tree,
        drafters=[
            verifier.LocalDrafts(method=offer.method, num_draft_tokens=offer.max_num_draft_tokens)
            for offer in auto.drafters
        ],
        max_round_us=auto.max_round_us,
    )


def _auto_drafts_from_wire(message: verifier.AutoDrafts) -> m.AutoDrafts:
    most = message.max_num_draft_tokens
    if not 1 <= most <= MAX_DRAFT_TOKENS or len(message.drafters) > MAX_OFFERS:
        raise InvalidRequest(
            f"auto_drafts: 1 to {MAX_DRAFT_TOKENS} tokens, at most {MAX_OFFERS} methods", param="auto_drafts"
        )
    offers = tuple(m.DrafterOffer(offer.method, max(0, offer.num_draft_tokens)) for offer in message.drafters)
    return m.AutoDrafts(most, message.token_tree, offers, max(0, message.max_round_us))


def _last_draft_from_wire(message: verifier.LastDraft) -> m.LastDraft:
    return m.LastDraft(max(0, message.waited_us), max(0, message.drafter_us), message.late, message.refused)


def _next_draft_from_wire(message: verifier.NextDraft) -> m.NextDraft:
    if message.num_draft_tokens <= 0:
        raise InvalidRequest("next_draft: a token at least must be asked for", param="next_draft")
    return m.NextDraft(message.method, message.num_draft_tokens, max(0, message.patience_us))


def _hidden_request_from_wire(message: verifier.HiddenStatesRequest) -> m.HiddenStatesRequest:
    if not message.layers or len(set(message.layers)) != len(message.layers):
        raise InvalidRequest("step: hidden_states must name layers, each once", param="hidden_states")
    return m.HiddenStatesRequest(tuple(message.layers), message.first_index)


def _local_drafts_from_wire(message: verifier.LocalDrafts) -> m.LocalDrafts:
    if message.num_draft_tokens <= 0:
        raise InvalidRequest("local_drafts: a token at least must be asked for", param="local_drafts")
    return m.LocalDrafts(message.method, message.num_draft_tokens, message.token_tree)


def commit_to_wire(commit: m.Commit) -> verifier.Commit:
    return verifier.Commit(
        epoch=commit.epoch,
        base_len=commit.base_len,
        token_ids=commit.token_ids,
        origins=[common.TokenOrigin.ValueType(origin) for origin in commit.origins],
        logprobs=map(logprob_to_wire, commit.logprobs),
        num_draft_tokens=commit.num_draft_tokens,
        num_accepted_tokens=commit.num_accepted_tokens,
        finish_reason=common.FinishReason.ValueType(commit.finish_reason or 0),
        stop_token_id=commit.stop_token_id,
        timings=timings_to_wire(commit.timings),
        hidden_states=hidden_to_wire(commit.hidden_states) if commit.hidden_states is not None else None,
        more=commit.more,
        num_cached_tokens=commit.num_cached_tokens,
        prompt_logprobs=map(logprob_to_wire, commit.prompt_logprobs),
        local_drafts=same_fields(verifier.LocalDrafts, commit.local_drafts),
        next_draft=same_fields(verifier.NextDraft, commit.next_draft),
        saved_us=commit.saved_us,
    )


def commit_from_wire(message: verifier.Commit) -> m.Commit:
    """Parses a commit. Raises InvalidRequest on an unknown origin or finish reason, and on broken hidden states."""
    try:
        origins = tuple(map(m.TokenOrigin, message.origins))
        finish_reason = m.FinishReason(message.finish_reason) if message.finish_reason else None
    except ValueError as error:
        raise InvalidRequest(f"commit: {error}", param="commit") from None
    return m.Commit(
        epoch=message.epoch,
        base_len=message.base_len,
        token_ids=tuple(message.token_ids),
        origins=origins,
        logprobs=logprobs_from_wire(message.logprobs),
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        finish_reason=finish_reason,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        timings=timings_from_wire(message.timings),
        hidden_states=(hidden_from_wire(message.hidden_states) if message.HasField("hidden_states") else None),
        more=message.more,
        num_cached_tokens=message.num_cached_tokens,
        prompt_logprobs=logprobs_from_wire(message.prompt_logprobs),
        local_drafts=_local_drafts_from_wire(message.local_drafts) if message.HasField("local_drafts") else None,
        next_draft=_next_draft_from_wire(message.next_draft) if message.HasField("next_draft") else None,
        saved_us=message.saved_us,
    )


def verifier_info_to_wire(info: m.VerifierInfo) -> verifier.VerifierInfo:
    return to_message(verifier.VerifierInfo(), info)


def verifier_info_from_wire(message: verifier.VerifierInfo) -> m.VerifierInfo:
    return from_message(m.VerifierInfo, message)
