"""What happens to a commit: cut it at a stop string, append it to the log, and only then emit it.

Appends and emission run in a task of their own, in order, so that the next round starts while Redis writes. The queue
between them is bounded: a reader that is too slow pauses its own session, nobody else's.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Protocol

from gateway.detokenizer import IncrementalDetokenizer, Piece
from gateway.requests import GenerationUpdate, SpeculationSummary
from shared.messages import Commit, FinishReason


class Log(Protocol):
    """Where commits go before anybody sees them (shared.commit_log.CommitLog, or memory for offline use)."""

    async def append(
        self, session_id: str, *, epoch: int, base_len: int, token_ids: tuple[int, ...], finish_reason: int
    ) -> None: ...


class SpeculationTally:
    """Counts one choice's rounds; only emitted tokens count."""

    def __init__(self, num_spec_tokens: int) -> None:
        self._num_spec_tokens = num_spec_tokens
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def add(self, commit: Commit) -> None:
        if commit.num_draft_tokens:
            self._drafted.append(commit.num_draft_tokens)
            self._accepted.append(commit.num_accepted_tokens)

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
        )


class CommitSink:
    """One choice's way out. `put` from the decode loop; `updates` is read by whoever answers the client."""

    def __init__(
        self,
        *,
        session_id: str,
        choice_index: int,
        log: Log,
        detokenizer: IncrementalDetokenizer,
        tally: SpeculationTally,
        updates: asyncio.Queue[GenerationUpdate | Exception],
        max_queued_commits: int,
    ) -> None:
        self._session_id = session_id
        self._choice_index = choice_index
        self._log = log
        self._detokenizer = detokenizer
        self._tally = tally
        self._updates = updates
        self._pending: asyncio.Queue[tuple[Commit, GenerationUpdate]] = asyncio.Queue(maxsize=max_queued_commits)
        self._failure: BaseException | None = None
        self._num_cached_tokens: int | None = None
        self.committed_token_ids: list[int] = []
        self._writer = asyncio.create_task(self._write_forever(), name=f"commit-sink-{session_id}")

    async def put(self, commit: Commit) -> Commit:
        """Returns the part of the commit that belongs to the output. Raises what an earlier append failed with."""
        if self._failure is not None:
            raise self._failure
        # The verifier ends a session with STOP only by a stop or end-of-sequence token, the last of the commit.
        piece = self._detokenizer.process(
            commit.token_ids, ends_with_stop_token=commit.finish_reason is FinishReason.STOP
        )
        kept = _cut(commit, piece)
        self._tally.add(kept)
        self.committed_token_ids.extend(kept.token_ids)
        await self._pending.put((kept, self._update(kept, piece)))
        return kept

    async def drain(self) -> None:
        """Waits until everything is in the log and emitted. Raises what an append failed with."""
        await self._pending.join()
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)

    def _update(self, kept: Commit, piece: Piece) -> GenerationUpdate:
        finished = kept.finish_reason is not None
        text = piece.text
        if finished and piece.stop_reason is None:
            text += self._detokenizer.finish()
        return GenerationUpdate(
            choice_index=self._choice_index,
            base_len=kept.base_len,
            token_ids=kept.token_ids,
            text=text,
            token_texts=piece.token_texts,
            origins=kept.origins,
            logprobs=kept.logprobs,
            prompt_logprobs=kept.prompt_logprobs,
            num_cached_tokens=kept.num_cached_tokens,
            finish_reason=kept.finish_reason,
            stop_reason=piece.stop_reason if piece.stop_reason is not None else kept.stop_token_id,
            speculation=self._tally.summary() if finished else None,
        )

    async def _write_forever(self) -> None:
        while True:
            commit, update = await self._pending.get()
            try:
                if self._failure is None:
                    await self._log.append(
                        self._session_id,
                        epoch=commit.epoch,
                        base_len=commit.base_len,
                        token_ids=commit.token_ids,
                        finish_reason=int(commit.finish_reason or 0),
                    )
                    await self._updates.put(update)
            except Exception as error:  # kept for the loop's next `put`
                self._failure = error
            finally:
                self._pending.task_done()


def _cut(commit: Commit, piece: Piece) -> Commit:
    """The commit up to the token that completed a stop string; draft tokens past it do not count as accepted."""
    if piece.stop_reason is None:
        return commit
    count = piece.num_tokens_kept
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
