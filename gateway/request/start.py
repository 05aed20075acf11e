"""Starts a request at this gateway: as a new one, or where another connection, maybe at another gateway, left off.

Both fill in `ValidRequest.starts`, one per choice; generation.py continues from there. Continuing a request supersedes
the gateway that was writing it: the log refuses its next append, so that no token is ever sent twice.

Not here: how an answer begins in its middle (answer_stream.py, grpc_server.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from outrider.gateway.request.answers import AnswerKind, Prepared, Wanted
from outrider.gateway.request.event_cursor import Seen
from outrider.gateway.request.record import SessionRecord, new_record
from outrider.gateway.request.types import ChoiceStart
from outrider.shared.errors import CommitRefused, InvalidRequest, UnknownModel, UnknownSession
from outrider.shared.log.commit_log import CommitLog, LogEntry, RequestLog
from outrider.shared.sampling_params import SpeculationMode

# A gateway numbers its own failovers within its term, so epochs grow whoever writes.
EPOCHS_PER_TERM = 1 << 20
# bits; of a random number that sets a connection's epochs apart in the log. Terms do not: a Redis that loses power
# gives the same one out again. Event ids name it, and have room for 15 digits.
_LOG_EPOCH_BITS = 40

Logs = Mapping[int, tuple[LogEntry, ...]]


def begin(log: CommitLog, kind: AnswerKind, prepared: Prepared, numerics: str | None = None) -> Prepared:
    """Sends the record on its way; the log refuses tokens until it is there. Raises what LogBudget.hold raises."""
    record = new_record(kind, prepared, numerics)
    request_log = log.new(_log_id(record.request_id, record.owner), record.encode(), record.owner)
    request_log.begin()
    return _started(record, request_log, range(record.num_choices), {}, {}, {})


async def resume(log: CommitLog, wanted: Wanted, model: str) -> Prepared:
    """Raises UnknownSession: never begun, expired, of another kind or somebody else's, which all look the same;
    InvalidRequest or CommitRefused: what was seen cannot be of this request, or the log has lost it.
    """
    request_log = await log.find(_log_id(wanted.request_id, wanted.owner))
    if request_log is None:
        raise _unknown(wanted)
    # A long prompt takes a while to read; streams continue.
    record = await asyncio.to_thread(SessionRecord.decode, request_log.record)
    if record.owner != wanted.owner or wanted.kind not in (None, record.kind):
        raise _unknown(wanted)
    if record.prepared.options.model != model:
        raise UnknownModel(f"the request was begun with model {record.prepared.options.model!r}, here is {model!r}")
    choices = _choices(record, wanted)
    logs = await request_log.read(choices)
    _check_seen(record, logs, wanted.seen)
    terms: Mapping[int, int] = {}
    open_choices = [place for place in choices if not _has_ended(logs[place])]
    if open_choices:
        try:
            # Those that have ended too: who continues a request answers for all of it, should Redis lose some.
            terms = await request_log.claim(choices)
        except UnknownSession:
            raise _unknown(wanted) from None
        # Again: what was written or lost between the first look and the claim counts, and nothing is written after it.
        logs = {**logs, **await request_log.read(open_choices)}
        _check_seen(record, logs, wanted.seen)
    return _started(record, request_log, choices, terms, logs, wanted.seen)


def _choices(record: SessionRecord, wanted: Wanted) -> Sequence[int]:
    if wanted.choice is None:
        return range(record.num_choices)
    if not 0 <= wanted.choice < record.num_choices:
        last = record.num_choices - 1
        raise InvalidRequest(f"choice must be between 0 and {last}, got {wanted.choice}", param="choice")
    return [wanted.choice]


def _log_id(request_id: str, owner: str) -> str:
    """Returns an id for the log. Ids have no spaces: no request can be taken for another owner's, or for no owner's."""
    return f"{owner} {request_id}" if owner else request_id


def _unknown(wanted: Wanted) -> UnknownSession:
    return UnknownSession(f"no request {wanted.request_id[:200]!r} is known here; it may have expired")


def _has_ended(log: tuple[LogEntry, ...]) -> bool:
    return bool(log) and log[-1].finish_reason != 0


def _stands_in(log: tuple[LogEntry, ...], seen: Seen) -> bool:
    """Returns whether the last token seen is the log's: a token drawn again comes from another session."""
    if seen.epoch is None or not seen.num_tokens:
        return True
    last = [entry for entry in log if entry.base_len < seen.num_tokens <= entry.end]
    last += [entry for entry in log if entry.base_len == entry.end == seen.num_tokens]  # the end alone
    return any(entry.epoch == seen.epoch for entry in last)


def _check_seen(record: SessionRecord, logs: Logs, all_seen: Mapping[int, Seen]) -> None:
    """Raises unless everything that the client has seen is in the log, or can be generated again."""
    last = max(all_seen, default=0)
    if last >= record.num_choices:
        raise InvalidRequest(f"choice {last} cannot have been seen, the request has {record.num_choices}")
    for choice, log in logs.items():
        seen = all_seen.get(choice, Seen())
        logged_len = log[-1].end if log else 0
        prompt_index, _ = record.place(choice)
        if seen.num_tokens <= logged_len and (not seen.finished or _has_ended(log)):
            if record.modes[prompt_index] is not SpeculationMode.EXACT and not _stands_in(log, seen):
                raise CommitRefused(
                    f"choice {choice}: of the {seen.num_tokens} tokens that have been seen, the last was lost with "
                    "Redis, and drawn again since; without a seed it does not come out the same once more"
                )
            continue
        limit = record.prepared.requests[prompt_index].sampling_params.max_tokens
        if _has_ended(log) or seen.num_tokens > limit:
            raise InvalidRequest(f"{seen.num_tokens} tokens of choice {choice} cannot have been seen, it has fewer")
        if record.modes[prompt_index] is not SpeculationMode.EXACT:
            raise CommitRefused(
                f"choice {choice}: {seen.num_tokens} tokens have been seen, but the log ends at {logged_len}; the rest "
                "was lost with Redis, and without a seed it does not come out the same once more"
            )


def _started(
    record: SessionRecord,
    request_log: RequestLog,
    choices: Sequence[int],
    terms: Mapping[int, int],
    logs: Logs,
    seen: Mapping[int, Seen],
) -> Prepared:
    starts: dict[int, list[ChoiceStart]] = {}
    log_epoch = secrets.randbits(_LOG_EPOCH_BITS)
    for choice in choices:
        prompt_index, choice_index = record.place(choice)
        term, logged = terms.get(choice, 0), logs.get(choice, ())
        starts.setdefault(prompt_index, []).append(
            ChoiceStart(
                choice_index=choice_index,
                mode=record.modes[prompt_index],
                stream_key=record.stream_keys[prompt_index][choice_index],
                log=request_log.choice(choice, term=term, entries=logged),
                epoch=term * EPOCHS_PER_TERM,
                log_epoch=0 if record.modes[prompt_index] is SpeculationMode.EXACT else 1 + log_epoch,
                logged=logged,
                seen_len=seen.get(choice, Seen()).num_tokens,
                numerics=record.numerics,
            )
        )
    requests = tuple(
        replace(request, starts=tuple(starts.get(place, ()))) for place, request in enumerate(record.prepared.requests)
    )
    return replace(record.prepared, requests=requests)
