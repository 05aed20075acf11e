"""Processes a commit: cuts it where its text ends the output, appends it to the log, and then emits it.

A separate task appends and emits in order, so the next round starts while Redis writes. The queue between them is
bounded: a slow reader pauses only its own session. An entry of the log (`entry_of`, `commit_of`) has all that is needed
to replay a stream. Not here: the log itself (shared/log/commit_log.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

from google.protobuf.message import DecodeError

from outrider.gateway.request.detokenizer import IncrementalDetokenizer, Piece, TextEnd
from outrider.gateway.request.types import ChoiceStart, GenerationUpdate, Round, SpeculationSummary
from outrider.shared.errors import InternalError
from outrider.shared.log.commit_log import LogEntry
from outrider.shared.messages import Commit, FinishReason, TokenOrigin
from outrider.shared.sampling_params import SpeculationMode
from outrider.shared.wire import logprob_to_wire, logprobs_from_wire
from outrider.v1 import log_pb2 as pb

# The log entry, None if already logged, and the updates to emit once it is.
_Pending = tuple[LogEntry | None, list[GenerationUpdate]]


def _nothing() -> None:
    pass


class SpeculationTally:
    """Counts one choice's rounds; only emitted tokens count."""

    def __init__(self, num_spec_tokens: int) -> None:
        self._num_spec_tokens = num_spec_tokens
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        self._num_emitted = 0
        self._saved_us = 0

    def add(self, commit: Commit) -> None:
        self._saved_us += commit.saved_us
        if commit.num_draft_tokens:
            self._drafted.append(commit.num_draft_tokens)
            self._accepted.append(commit.num_accepted_tokens)
            self._num_emitted += len(commit.token_ids)

    def summary(self) -> SpeculationSummary:
        histogram = [0] * (max(self._drafted, default=0) + 1)
        for accepted in self._accepted:
            histogram[accepted] += 1
        return SpeculationSummary(
            num_spec_tokens=self._num_spec_tokens,
            num_spec_steps=len(self._drafted),
            num_draft_tokens=sum(self._drafted),
            num_accepted_draft_tokens=sum(self._accepted),
            acceptance_histogram=tuple(histogram),
            per_step_accepted=tuple(self._accepted),
            per_step_drafted=tuple(self._drafted),
            num_emitted_tokens=self._num_emitted,
            saved_us=self._saved_us,
        )


class CommitSink:
    """One choice's output. The decode loop calls `put`; the answer to the client reads `updates`."""

    def __init__(
        self,
        start: ChoiceStart,
        *,
        detokenizer: IncrementalDetokenizer,
        tally: SpeculationTally,
        updates: asyncio.Queue[GenerationUpdate | Exception],
        max_queued_commits: int,
        on_logged: Callable[[], None] = _nothing,
    ) -> None:
        """on_logged: called after each append."""
        self._start = start
        self._detokenizer = detokenizer
        self._tally = tally
        self._updates = updates
        self._pending: asyncio.Queue[_Pending] = asyncio.Queue(maxsize=max_queued_commits)
        self._failure: BaseException | None = None
        self._num_rounds = 0
        self._on_logged = on_logged
        self.committed_token_ids: list[int] = []
        self._writer = asyncio.create_task(self._write_forever(), name=f"commit-sink-{start.choice_index}")

    async def replay(self) -> bool:
        """Processes what the log already has, so that all state is as if it had been decoded here. Returns whether the
        output has ended.
        """
        finished = False
        for entry in self._start.logged:
            commit, end = commit_of(entry)
            _, _, updates = self._take(commit, is_ended_by_text=end is not None)
            await self._pending.put((None, [dataclasses.replace(update, replayed=True) for update in updates]))
            finished = commit.finish_reason is not None
        return finished

    async def put(self, commit: Commit) -> Commit:
        """Returns the part of the commit that belongs to the output. Raises an earlier append's error."""
        if self._failure is not None:
            raise self._failure
        if commit.base_len > 0 and (commit.num_cached_tokens or commit.prompt_logprobs):
            # Sent once, with the first tokens; a verifier that takes over has other figures.
            commit = dataclasses.replace(commit, num_cached_tokens=0, prompt_logprobs=())
        if self._start.log_epoch:
            commit = dataclasses.replace(commit, epoch=self._start.log_epoch + commit.epoch)
        kept, end, updates = self._take(commit, is_ended_by_text=False)
        await self._pending.put((entry_of(kept, end), updates))
        return kept

    async def drain(self) -> None:
        """Waits until everything is logged and emitted. Raises an append's error."""
        await self._pending.join()
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)

    def _take(self, commit: Commit, *, is_ended_by_text: bool) -> tuple[Commit, TextEnd | None, list[GenerationUpdate]]:
        """The part of the commit in the output, and its updates: two if a resumed client's part ends within."""
        # A verifier ends a session with STOP only on a stop or end-of-sequence token, the last of the commit.
        by_token = commit.finish_reason is FinishReason.STOP and not is_ended_by_text
        pieces: list[Piece] = []
        for part in _split(commit, self._start.seen_len):
            has_last_token = part.end == commit.end and bool(part.token_ids)
            pieces.append(self._detokenizer.process(part.token_ids, ends_with_stop_token=by_token and has_last_token))
            if pieces[-1].end is not None:
                break
        end = pieces[-1].end
        kept = commit if end is None else _cut(commit, sum(piece.num_tokens_kept for piece in pieces))
        self._tally.add(kept)
        self.committed_token_ids.extend(kept.token_ids)
        this_round = _round(self._num_rounds, kept)
        self._num_rounds += 1
        parts = _split(kept, self._start.seen_len)
        if len(parts) > len(pieces):  # the text ends where the client's part does, but that it ends is new
            pieces.append(Piece(0, "", (), end))
        paired = zip(parts, pieces, strict=True)
        return kept, end, [self._update(part, piece, end, this_round) for part, piece in paired]

    def _update(self, part: Commit, piece: Piece, end: TextEnd | None, this_round: Round) -> GenerationUpdate:
        finished = part.finish_reason is not None
        text = piece.text
        if finished and end is None:
            text += self._detokenizer.finish()
        return GenerationUpdate(
            choice_index=self._start.choice_index,
            base_len=part.base_len,
            token_ids=part.token_ids,
            text=text,
            token_texts=piece.token_texts,
            origins=part.origins,
            logprobs=part.logprobs,
            prompt_logprobs=part.prompt_logprobs,
            rounds=(this_round,),
            num_cached_tokens=part.num_cached_tokens,
            finish_reason=part.finish_reason,
            stop_reason=end.stop_string if finished and end is not None else part.stop_token_id,
            speculation=self._tally.summary() if finished else None,
            epoch=0 if self._start.mode is SpeculationMode.EXACT else part.epoch,
            committed_at_s=time.monotonic(),
        )

    async def _write_forever(self) -> None:
        while True:
            entry, updates = await self._pending.get()
            try:
                if self._failure is None:
                    if entry is not None:
                        await self._start.log.append(entry)
                        self._on_logged()
                    for update in updates:
                        await self._updates.put(update)
            except Exception as error:  # raised by the loop's next `put`
                self._failure = error
            finally:
                self._pending.task_done()


def _round(index: int, commit: Commit) -> Round:
    return Round(
        index=index,
        base_len=commit.base_len,
        num_tokens=len(commit.token_ids),
        num_draft_tokens=commit.num_draft_tokens,
        num_accepted_tokens=commit.num_accepted_tokens,
        method=commit.draft_method,
        drafter=commit.drafter,
    )


def _cut(commit: Commit, count: int) -> Commit:
    """Cuts the commit after the token that completed the text's end; later draft tokens do not count as accepted."""
    return dataclasses.replace(
        commit,
        token_ids=commit.token_ids[:count],
        origins=commit.origins[:count],
        logprobs=commit.logprobs[:count],
        num_accepted_tokens=min(commit.num_accepted_tokens, count),
        finish_reason=FinishReason.STOP,
        stop_token_id=None,
        more=False,
    )


def _split(commit: Commit, at: int) -> list[Commit]:
    """Splits at output index `at`, if tokens come before it and something, possibly only the end, after it."""
    count = at - commit.base_len
    last_count = len(commit.token_ids) - (commit.finish_reason is None)
    if not 0 < count <= last_count:
        return [commit]
    first = dataclasses.replace(
        commit,
        token_ids=commit.token_ids[:count],
        origins=commit.origins[:count],
        logprobs=commit.logprobs[:count],
        finish_reason=None,
        stop_token_id=None,
    )
    second = dataclasses.replace(
        commit,
        base_len=at,
        token_ids=commit.token_ids[count:],
        origins=commit.origins[count:],
        logprobs=commit.logprobs[count:],
        num_cached_tokens=0,
        prompt_logprobs=(),
    )
    return [first, second]


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
