"""Sessions straight at one service, without a gateway, that read what the service says its work took.

Batches are made on purpose: all sessions ask at once, for equally many rows. How many of them a service takes together
is its own affair; it says so, and so each measurement goes with the batch that it was made in.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from typing import NamedTuple, Self

import grpc.aio

from outrider.gateway.fleet.remote import RemoteDrafter, RemoteVerifier
from outrider.shared import rpc
from outrider.shared.messages import Commit, DraftStep, Proposal, SessionSpec, VerifyStep
from outrider.shared.sampling_params import SamplingParams, SpeculationMode

_PROMPT_LEN = 100
_MAX_TOKENS = 2000
# Ids that every vocabulary of the demo family has.
_TOKEN_IDS = range(10, 1000)
_FREE_RUN = 32


class _Probe:
    def __init__(self, address: str) -> None:
        self._address = address
        self._rng = random.Random(0)
        self._names = itertools.count()

    async def __aenter__(self) -> Self:
        self._channel: grpc.aio.Channel = rpc.open_channel(self._address)
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._channel.close()

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(_TOKEN_IDS, k=count))

    def _spec(self, prompt_len: int = _PROMPT_LEN, method: str = "") -> SessionSpec:
        return SessionSpec(
            session_id=f"probe-{next(self._names)}",
            epoch=1,
            prompt_token_ids=self._tokens(prompt_len),
            committed_token_ids=(),
            sampling_params=SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, ignore_eos=True),
            mode=SpeculationMode.EXACT,
            stream_key=1,
            cache_salt="",
            method=method,
        )


# Sessions or rows of a batch, and seconds.
Sample = tuple[int, float]


class Forward(NamedTuple):
    num_sessions: int
    num_rows: int
    seconds: float


class VerifyProbe(_Probe):
    """Measures forwards, as the verifier times them."""

    async def forwards(self, num_sessions: int, num_draft_tokens: int, num_rounds: int) -> list[Forward]:
        sessions = [await self._open() for _ in range(num_sessions)]
        lens = [1] * num_sessions
        found: list[Forward] = []
        for round_index in range(num_rounds + 1):
            steps = zip(sessions, lens, strict=True)
            commits = await asyncio.gather(*(self._verify(session, at, num_draft_tokens) for session, at in steps))
            lens = [commit.end for commit in commits]
            if round_index:  # the first one warms up
                timings = [commit.timings for commit in commits]
                # Sessions of one forward report the same; two rounds may too, to the microsecond, and both count.
                found += {
                    Forward(each.batch_sessions, each.batch_sessions * (1 + num_draft_tokens), each.forward_us * 1e-6)
                    for each in timings
                }
        await _close(sessions)
        return found

    async def prefills(self, num_rows: int, repeats: int) -> list[float]:
        """Seconds of a whole prompt in one forward."""
        found = []
        for _ in range(repeats + 1):
            session = RemoteVerifier(self._channel, self._address)
            await session.open(self._spec(num_rows))
            found.append((await self._verify(session, 0, 0)).timings.forward_us * 1e-6)
            await session.close()
        return found[1:]

    async def gaps(self, num_sessions: int, num_rounds: int) -> list[Sample]:
        """(sessions, seconds from one forward's end to the next one's beginning), while they decode freely."""
        sessions = [await self._open() for _ in range(num_sessions)]

        async def run(session: RemoteVerifier) -> list[Sample]:
            step = VerifyStep(1, 1, None, max(_FREE_RUN, num_rounds))
            timings = [commit.timings async for commit in session.verify(step)]
            # The first one has waited for its turn.
            return [(each.batch_sessions, each.queue_us * 1e-6) for each in timings[1:]]

        runs = await asyncio.gather(*(run(session) for session in sessions))
        await _close(sessions)
        return [sample for samples in runs for sample in samples]

    async def trips(self, repeats: int) -> list[float]:
        """Seconds of one step there and its commit back, less the verifier's own time."""
        session = await self._open()
        found, at = [], 1
        for _ in range(repeats):
            started = time.perf_counter()
            commit = await self._verify(session, at, 0)
            found.append(time.perf_counter() - started - commit.timings.total_us * 1e-6)
            at = commit.end
        await session.close()
        return found

    async def _open(self) -> RemoteVerifier:
        """Opens a session: its prompt computed, one token committed."""
        session = RemoteVerifier(self._channel, self._address)
        await session.open(self._spec())
        await self._verify(session, 0, 0)
        return session

    async def _verify(self, session: RemoteVerifier, base_len: int, num_draft_tokens: int) -> Commit:
        proposal = Proposal(base_len, self._tokens(num_draft_tokens), "probe") if num_draft_tokens else None
        step = VerifyStep(1, base_len, proposal, 0 if proposal else 1)
        return [commit async for commit in session.verify(step)][-1]


class DraftProbe(_Probe):
    """Measures proposals, as the drafter times them."""

    def __init__(self, address: str, method: str) -> None:
        super().__init__(address)
        self._method = method

    async def proposals(self, num_sessions: int, num_draft_tokens: int, num_rounds: int) -> set[Sample]:
        """(sessions, seconds). Each has had the first token of its last draft accepted, as a session that continues."""
        sessions = [await self._open() for _ in range(num_sessions)]
        committed: list[tuple[int, ...]] = [self._tokens(1)] * num_sessions
        found: set[Sample] = set()
        for base_len in range(num_rounds + 1):
            steps = [DraftStep(1, base_len, tokens, num_draft_tokens) for tokens in committed]
            replies = await asyncio.gather(
                *(session.propose(step) for session, step in zip(sessions, steps, strict=True))
            )
            committed = [reply.proposal.token_ids[:1] for reply in replies]
            if base_len and all(len(reply.proposal.token_ids) == num_draft_tokens for reply in replies):
                found |= {(reply.timings.batch_sessions, reply.timings.forward_us * 1e-6) for reply in replies}
        await _close(sessions)
        return found

    async def first_proposals(self, num_rows: int, repeats: int) -> list[float]:
        """Seconds of one token, with a prompt before it that is computed in the same forward."""
        found = []
        for _ in range(repeats + 1):
            session = await self._open(num_rows - 1)
            reply = await session.propose(DraftStep(1, 0, self._tokens(1), 1))
            found.append(reply.timings.forward_us * 1e-6)
            await session.close()
        return found[1:]

    async def _open(self, prompt_len: int = _PROMPT_LEN) -> RemoteDrafter:
        session = RemoteDrafter(self._channel, self._address)
        await session.open(self._spec(prompt_len, self._method))
        return session


async def _close(sessions: list[RemoteVerifier] | list[RemoteDrafter]) -> None:
    for session in sessions:
        await session.close()
