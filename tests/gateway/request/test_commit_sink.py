"""What goes to the log is enough to tell the same stream again, from the beginning or from any token on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from outrider.gateway.request.commit_sink import CommitSink, SpeculationTally, commit_of, entry_of
from outrider.gateway.request.detokenizer import IncrementalDetokenizer, TextEnd
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import ChoiceStart, GenerationUpdate
from outrider.gateway.tool_calls.plan import OutputPlan
from outrider.shared.errors import CommitRefused
from outrider.shared.log.commit_log import LogEntry
from outrider.shared.messages import Commit, FinishReason, TokenLogprob, TokenOrigin
from outrider.shared.sampling_params import SpeculationMode

TEXT = "Paris is the capital 漢字 👩‍👩‍👧 of France."
ORIGINS = tuple(TokenOrigin)


@dataclass
class MemoryLog:
    """A log that nothing survives."""

    entries: list[LogEntry] = field(default_factory=list)
    error: Exception | None = None

    async def append(self, entry: LogEntry) -> None:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.entries.append(entry)


def commits(token_ids: Sequence[int], size: int, finish: FinishReason, stop_token_id: int | None) -> list[Commit]:
    rows = []
    for base_len in range(0, len(token_ids), size):
        group = tuple(token_ids[base_len : base_len + size])
        last = base_len + size >= len(token_ids)
        rows.append(
            Commit(
                epoch=3,
                base_len=base_len,
                token_ids=group,
                origins=tuple(ORIGINS[(base_len + place) % 4] for place in range(len(group))),
                logprobs=tuple(TokenLogprob(-0.5 * token_id, 2, (1, 2), (-0.25, -0.5)) for token_id in group),
                num_draft_tokens=size,
                num_accepted_tokens=len(group) - 1,
                finish_reason=finish if last else None,
                stop_token_id=stop_token_id if last else None,
                num_cached_tokens=8,
                prompt_logprobs=(TokenLogprob(0.0, 1), TokenLogprob(-1.0, 3)),
            )
        )
    return rows


@dataclass(frozen=True)
class Case:
    tokenizer: Tokenizer
    stop: tuple[str, ...]
    include_stop: bool
    text: str = TEXT

    def sink(self, start: ChoiceStart, updates: asyncio.Queue[Any]) -> CommitSink:
        return CommitSink(
            start,
            detokenizer=IncrementalDetokenizer(
                self.tokenizer,
                [1],
                stop=self.stop,
                include_stop_str_in_output=self.include_stop,
                only_call=OutputPlan(tool_call_parser="hermes", properties='{"f": {}}', parallel=False).parser(),
            ),
            tally=SpeculationTally(5),
            updates=updates,
            max_queued_commits=100,
        )

    async def decode(self, rows: list[Commit], log: MemoryLog, **start: Any) -> list[GenerationUpdate]:
        """As the decode loop does it, after what `start` has in its log."""
        updates: asyncio.Queue[Any] = asyncio.Queue()
        sink = self.sink(ChoiceStart(4, SpeculationMode.EXACT, 0, log, **start), updates)
        try:
            if not await sink.replay():
                for commit in rows:
                    if commit.base_len < len(sink.committed_token_ids):
                        continue
                    if (await sink.put(commit)).finish_reason is not None:
                        break
            await sink.drain()
        finally:
            await sink.close()
        return [updates.get_nowait() for _ in range(updates.qsize())]


CALL = 'I call. <tool_call>{"name": "f", "arguments": {"a": "漢"}}'
CASES: list[tuple[tuple[str, ...], bool, str]] = [
    ((), False, TEXT),
    (("capital 漢",), False, TEXT),
    (("f Fr",), True, TEXT),
    (("zz",), False, TEXT),
    ((), False, f"{CALL}</tool_call> {TEXT}"),
]


@pytest.fixture(params=CASES, ids=["no stop", "stop", "stop included", "stop that never comes", "only call"])
def case(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Case:
    return Case(tokenizer, *request.param)


ENDS = pytest.mark.parametrize(
    ("finish", "stop_token_id"),
    [(FinishReason.LENGTH, None), (FinishReason.STOP, None), (FinishReason.STOP, 39)],
    ids=["length", "end of sequence", "stop token"],
)


@ENDS
@pytest.mark.parametrize("size", [1, 3, 7, 100])
async def test_the_log_tells_the_same_stream_again(
    case: Case, size: int, finish: FinishReason, stop_token_id: int | None
) -> None:
    token_ids = case.tokenizer.encode(case.text)
    rows = commits(token_ids, size, finish, stop_token_id)
    log = MemoryLog()
    told = await case.decode(rows, log)
    assert told[-1].finish_reason is not None
    assert told[0].num_cached_tokens == 8
    assert [update.num_cached_tokens for update in told[1:]] == [0] * (len(told) - 1)
    again = await case.decode([], MemoryLog(), logged=tuple(log.entries))
    assert again == [replace(update, replayed=True) for update in told]
    for num_logged in range(len(log.entries)):
        rest = MemoryLog()
        halves = await case.decode(rows, rest, logged=tuple(log.entries[:num_logged]))
        assert [update.replayed for update in halves] == [place < num_logged for place in range(len(told))]
        assert [replace(update, replayed=False) for update in halves] == told
        assert log.entries[:num_logged] + rest.entries == log.entries


@ENDS
@pytest.mark.parametrize("size", [1, 3, 7, 100])
async def test_no_update_reaches_across_what_the_client_has(
    case: Case, size: int, finish: FinishReason, stop_token_id: int | None
) -> None:
    """Whether it comes from the log or is decoded once more; and the text before and after is the same text."""
    token_ids = case.tokenizer.encode(case.text)
    rows = commits(token_ids, size, finish, stop_token_id)
    log = MemoryLog()
    told = await case.decode(rows, log)
    by_token = await case.decode(commits(token_ids, 1, finish, stop_token_id), MemoryLog())
    num_tokens = sum(len(update.token_ids) for update in told)
    for seen_len in range(num_tokens + 1):
        for logged in ((), tuple(log.entries)):
            updates = await case.decode(rows, MemoryLog(), logged=logged, seen_len=seen_len)
            assert not [one for one in updates if one.base_len < seen_len < one.base_len + len(one.token_ids)]
            after = [one for one in updates if one.base_len >= seen_len]
            before = [one for one in updates if one.base_len < seen_len]
            assert all(one.finish_reason is None for one in before)
            assert [one.finish_reason is None for one in after] == [True] * (len(after) - 1) + [False]
            # But for the token that ends it, whose text comes with the end.
            shown = "".join(one.text for one in before)
            if seen_len < num_tokens:
                assert shown == "".join(one.text for one in by_token[:seen_len])
            for name in ("token_ids", "token_texts", "origins", "logprobs"):
                joined = [value for one in updates for value in getattr(one, name)]
                assert joined == [value for one in told for value in getattr(one, name)]
            assert "".join(one.text for one in updates) == "".join(one.text for one in told)
            assert (updates[-1].stop_reason, updates[-1].speculation) == (told[-1].stop_reason, told[-1].speculation)
            assert updates[0].prompt_logprobs == rows[0].prompt_logprobs
            assert all(one.prompt_logprobs == () for one in updates[1:])


async def test_nothing_is_emitted_that_is_not_logged(tokenizer: Tokenizer) -> None:
    rows = commits(tokenizer.encode(TEXT), 3, FinishReason.LENGTH, None)
    updates: asyncio.Queue[Any] = asyncio.Queue()
    log = MemoryLog()
    case = Case(tokenizer, (), False)
    sink = case.sink(ChoiceStart(0, SpeculationMode.EXACT, 0, log), updates)
    await sink.put(rows[0])
    await sink.drain()
    log.error = CommitRefused("another connection has taken over")
    await sink.put(rows[1])
    with pytest.raises(CommitRefused):
        await sink.drain()
    with pytest.raises(CommitRefused):
        await sink.put(rows[2])
    await sink.close()
    assert updates.qsize() == len(log.entries) == 1


@ENDS
@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize("after", ["", "</tool_call>", f"\n{TEXT}"])
async def test_a_commit_is_cut_behind_an_only_call(
    tokenizer: Tokenizer, size: int, finish: FinishReason, stop_token_id: int | None, after: str
) -> None:
    """Where the call's last token is one that stops, that is the reason."""
    case = Case(tokenizer, (), False, CALL + after)
    token_ids, num_tokens = tokenizer.encode(case.text), len(tokenizer.encode(CALL))
    log = MemoryLog()
    told = await case.decode(commits(token_ids, size, finish, stop_token_id), log)
    assert sum(len(entry.token_ids) for entry in log.entries) == num_tokens
    is_stopped_by_token = not after and finish is FinishReason.STOP
    assert told[-1].finish_reason is FinishReason.STOP
    assert told[-1].stop_reason == (stop_token_id if is_stopped_by_token else None)
    shown = tokenizer.decode(token_ids[: num_tokens - is_stopped_by_token])
    assert "".join(update.text for update in told) == shown


async def test_a_stop_string_that_spans_the_boundary_is_found(tokenizer: Tokenizer) -> None:
    """Its beginning is in the log of one gateway, its end comes at the next."""
    token_ids = tokenizer.encode(TEXT)
    rows = commits(token_ids, 1, FinishReason.LENGTH, None)
    start = next(place for place in range(len(token_ids)) if tokenizer.decode(token_ids[:place]).endswith("capit"))
    case = Case(tokenizer, ("capital",), False)
    first = MemoryLog()
    sink = case.sink(ChoiceStart(0, SpeculationMode.EXACT, 0, first), asyncio.Queue())
    for commit in rows[:start]:
        await sink.put(commit)
    await sink.drain()
    await sink.close()
    second = await case.decode(rows, MemoryLog(), logged=tuple(first.entries), seen_len=start)
    assert "".join(one.text for one in second) == "Paris is the "
    assert (second[-1].stop_reason, second[-1].finish_reason) == ("capital", FinishReason.STOP)
    assert all("cap" not in one.text for one in second)


@ENDS
def test_an_entry_holds_all_of_a_commit(finish: FinishReason, stop_token_id: int | None) -> None:
    [commit] = commits([5, 6, 7], 3, finish, stop_token_id)
    commit = replace(commit, saved_us=-250)
    assert commit_of(entry_of(commit, None)) == (commit, None)
    for end in (TextEnd("stop"), TextEnd()):
        assert commit_of(entry_of(commit, end)) == (commit, end)
    bare = Commit(0, 9, (), (), finish_reason=finish)
    assert commit_of(entry_of(bare, None)) == (bare, None)


async def test_a_last_round_that_ends_on_a_draft_token_counts_what_it_emitted() -> None:
    """Two rounds: one of two accepted tokens and a bonus, one whose fourth accepted token would be beyond the end."""
    tally = SpeculationTally(4)
    for base_len, tokens, accepted, finish in ((0, (5, 6, 7), 2, None), (3, (8, 9), 2, FinishReason.LENGTH)):
        tally.add(
            Commit(
                epoch=0,
                base_len=base_len,
                token_ids=tokens,
                origins=(TokenOrigin.ACCEPTED,) * len(tokens),
                num_draft_tokens=4,
                num_accepted_tokens=accepted,
                finish_reason=finish,
            )
        )
    assert tally.summary().mean_acceptance_length == 5 / 2
    assert tally.summary().num_accepted_draft_tokens == 4
