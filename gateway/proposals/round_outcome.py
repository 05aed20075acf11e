"""A round as the draft policy sees it: from the answer that drafted it and the commit that it brought."""

from __future__ import annotations

from outrider.gateway.draft_length.draft_policy import RoundOutcome
from outrider.gateway.proposals.ask import Answer
from outrider.shared.messages import Commit


def round_outcome(
    drafted: Answer,
    commit: Commit,
    *,
    round_s: float,
    is_prefill: bool,
    num_wanted: int,
    max_tokens: int,
    draft_rows_s: tuple[float, ...],
) -> RoundOutcome:
    """drafted: DraftSource.drafted of this commit. round_s: waiting for the draft included. num_wanted: draft tokens
    that the session wants a round. max_tokens: of its output. draft_rows_s: as in RoundOutcome.
    """
    verifier, drafter = commit.timings, drafted.timings
    # The end of the output cuts a draft off, which says nothing of the drafter.
    room = max(0, max_tokens - commit.base_len - 1)
    # Only a round that waited for the drafter tells what asking it costs.
    has_answer = drafted.wait_s > 0.0
    num_asked = min(drafted.ask.num_draft_tokens, room) if has_answer else 0
    # What the drafter did while the verifier worked cost the round nothing.
    drafter_s = min(drafter.total_us * 1e-6, drafted.wait_s)
    draft_s = min(drafter.forward_us * 1e-6, drafter_s)
    if not verifier.draft_depth:
        draft_s *= num_asked / max(1, drafted.ask.num_draft_tokens)
    verifier_s = (verifier.total_us - verifier.draft_us) * 1e-6
    return RoundOutcome(
        num_asked=num_asked,
        num_draft_tokens=commit.num_draft_tokens,
        num_accepted=commit.num_accepted_tokens,
        batch_sessions=verifier.batch_sessions,
        draft_rows_s=draft_rows_s,
        tokens_per_s=verifier.tokens_per_s,
        method=drafted.method if has_answer else "",
        round_tokens=verifier.round_tokens,
        round_s=verifier.round_us * 1e-6,
        open_sessions=verifier.open_sessions,
        may_be_ahead=drafted.may_be_ahead,
        is_catch_up=drafted.is_catch_up,
        draft_depth=verifier.draft_depth,
        num_beyond_end=max(0, num_wanted - num_asked) if num_asked == room else 0,
        draft_s=draft_s,
        # Local drafts do not travel.
        overhead_s=0.0 if verifier.draft_us else max(0.0, round_s - verifier_s - drafter_s),
        verify_s=0.0 if is_prefill else verifier_s,
    )
