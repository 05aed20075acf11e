"""What an annotated answer says of rounds: who drafted, how much, how much was good; and that the log keeps it."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from typing import Any

import httpx
from gateway_script import ScriptedService
from in_process import NGRAM, TRUTH, Choice, PlainDrafter

from outrider.gateway.proposals.drafter_connection import Lease
from outrider.gateway.request.commit_sink import commit_of, entry_of
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import GenerationUpdate, Round
from outrider.shared.errors import DrafterLost
from outrider.shared.messages import Commit, DraftStep, ProposalReply, TokenOrigin

ADDRESS = "drafter-a:7002"


@dataclass
class WatchedChoice(Choice):
    """Keeps the updates; its drafter has an address."""

    updates: list[GenerationUpdate] = field(default_factory=list)

    def acquire(self, method: str) -> Lease | None:
        lease = super().acquire(method)
        return lease and Lease(lease.drafter, lease.method, lease.release, ADDRESS)

    async def _read(self, updates: asyncio.Queue[GenerationUpdate]) -> None:
        while True:
            self.updates.append(await updates.get())
            self.output.extend(self.updates[-1].token_ids)

    @property
    def rounds(self) -> list[Round]:
        [*rounds] = (one for update in self.updates for one in update.rounds)
        return rounds


async def wrong_second(drafter: PlainDrafter, step: DraftStep) -> ProposalReply:
    """Two tokens right, the third wrong."""
    right = TRUTH[step.committed_len :][: step.num_draft_tokens]
    return drafter.reply(step, [*right[:2], *(token_id + 1 for token_id in right[2:])])


async def test_rounds_tell_who_drafted_and_tile_the_output(tokenizer: Tokenizer) -> None:
    choice = WatchedChoice(tokenizer, [PlainDrafter(wrong_second)])
    assert await choice.run() == TRUTH
    assert [one.index for one in choice.rounds] == list(range(len(choice.updates)))
    end = 0
    for one, update in zip(choice.rounds, choice.updates, strict=True):
        assert (one.base_len, one.num_tokens) == (end, len(update.token_ids))
        end += one.num_tokens
    assert end == len(TRUTH)
    first, *others = choice.rounds
    assert first == Round(0, 0, 1, 0, 0)  # the prefill has no draft
    full = [one for one in others if one.num_draft_tokens == 4]
    assert len(full) > 10
    assert all((one.num_accepted_tokens, one.num_tokens) == (2, 3) for one in full)
    assert {(one.method, one.drafter) for one in full} == {(NGRAM.name, ADDRESS)}


async def test_rounds_after_the_drafters_death_name_nobody(tokenizer: Tokenizer) -> None:
    async def dies(drafter: PlainDrafter, step: DraftStep) -> None:
        if step.committed_len > 20:
            raise DrafterLost("gone")

    choice = WatchedChoice(tokenizer, [PlainDrafter(dies), None])
    assert await choice.run() == TRUTH
    drafted = [bool(one.drafter) for one in choice.rounds if one.base_len > 0]
    num_drafted = sum(drafted)
    assert num_drafted >= 4
    assert drafted == [True] * num_drafted + [False] * (len(drafted) - num_drafted)
    assert all(one.num_draft_tokens == 0 and not one.method for one in choice.rounds if not one.drafter)


def test_the_log_keeps_the_drafter() -> None:
    commit = Commit(
        0, 3, (5, 6), (TokenOrigin.ACCEPTED, TokenOrigin.BONUS), num_draft_tokens=1, drafter=ADDRESS, draft_method="x"
    )
    again, _ = commit_of(entry_of(commit, None))
    assert again == commit


async def test_annotated_answers_carry_rounds(http: httpx.AsyncClient, service: ScriptedService) -> None:
    """The same rounds in the whole answer as in all events together; nothing where nobody asked."""
    body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 12, "speculation": {"annotate": True}}
    whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]["outrider"]["rounds"]
    assert [one["base_len"] for one in whole] == [0, 3, 6, 9]
    assert whole[1] == {
        "index": 1,
        "base_len": 3,
        "num_tokens": 3,
        "num_draft_tokens": 4,
        "num_accepted_tokens": 2,
        "method": "ngram",
        "drafter": "drafter-a:7002",
    }
    stream = (await http.post("/v1/completions", json={**body, "stream": True})).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    assert [one for event in events for one in event["choices"][0]["outrider"]["rounds"]] == whole
    plain = (await http.post("/v1/completions", json={**body, "speculation": {"method": "auto"}})).json()
    assert "outrider" not in plain["choices"][0]


async def test_annotated_streams_say_when_the_gateway_had_the_tokens(http: httpx.AsyncClient) -> None:
    """In comments: the events are those of any other stream."""
    body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 12, "stream": True}
    lines = (await http.post("/v1/completions", json={**body, "speculation": {"annotate": True}})).text.splitlines()
    times = [re.fullmatch(r": server time \d\.\d{4} s", line) for line in lines if line.startswith(":")]
    num_events = sum(line.startswith("data: {") for line in lines)
    assert len(times) == num_events == 4
    assert all(times)
    assert ":" not in {line[:1] for line in (await http.post("/v1/completions", json=body)).text.splitlines()}
