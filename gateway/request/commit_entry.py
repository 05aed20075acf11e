"""Converts commits to log entries and back: all that is needed to replay a stream.

Not here: the log itself (shared/log/commit_log.py), and which part of a commit is stored (commit_sink.py).
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from outrider.gateway.request.detokenizer import TextEnd
from outrider.shared.errors import InternalError
from outrider.shared.log.commit_log import LogEntry
from outrider.shared.messages import Commit, FinishReason, TokenOrigin
from outrider.shared.wire import logprob_to_wire, logprobs_from_wire
from outrider.v1 import log_pb2 as pb


def entry_of(commit: Commit, end: TextEnd | None) -> LogEntry:
    """Returns the log entry. end: what in the text ended the output; None: nothing, or the verifier ended it."""
    extras = pb.CommitExtras(
        origins=bytes(commit.origins),
        logprobs=map(logprob_to_wire, commit.logprobs),
        prompt_logprobs=map(logprob_to_wire, commit.prompt_logprobs),
        num_draft_tokens=commit.num_draft_tokens,
        num_accepted_tokens=commit.num_accepted_tokens,
        num_cached_tokens=commit.num_cached_tokens,
        stop_token_id=commit.stop_token_id,
        stop_string=end.stop_string if end is not None else None,
        ends_with_call=end is not None and end.stop_string is None,
        drafter=commit.drafter,
        draft_method=commit.draft_method,
        saved_us=commit.saved_us,
    )
    return LogEntry(
        base_len=commit.base_len,
        token_ids=commit.token_ids,
        finish_reason=int(commit.finish_reason or 0),
        epoch=commit.epoch,
        extras=extras.SerializeToString(),
    )


def commit_of(entry: LogEntry) -> tuple[Commit, TextEnd | None]:
    """Returns the commit, and what in its text ended the output. Raises InternalError when the entry is broken."""
    try:
        extras = pb.CommitExtras.FromString(entry.extras)
        origins = tuple(map(TokenOrigin, extras.origins))
        finish_reason = FinishReason(entry.finish_reason) if entry.finish_reason else None
    except (DecodeError, ValueError) as error:
        raise InternalError(f"the log of a request is broken: {error}") from None
    commit = Commit(
        epoch=entry.epoch,
        base_len=entry.base_len,
        token_ids=entry.token_ids,
        origins=origins,
        logprobs=logprobs_from_wire(extras.logprobs),
        num_draft_tokens=extras.num_draft_tokens,
        num_accepted_tokens=extras.num_accepted_tokens,
        finish_reason=finish_reason,
        stop_token_id=extras.stop_token_id if extras.HasField("stop_token_id") else None,
        num_cached_tokens=extras.num_cached_tokens,
        prompt_logprobs=logprobs_from_wire(extras.prompt_logprobs),
        drafter=extras.drafter,
        draft_method=extras.draft_method,
        saved_us=extras.saved_us,
    )
    if extras.HasField("stop_string"):
        return commit, TextEnd(extras.stop_string)
    return commit, TextEnd() if extras.ends_with_call else None
