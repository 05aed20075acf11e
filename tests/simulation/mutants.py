"""Planted bugs of the protocol: each is a patch of the product, and a seed must find it.

python -m tests.simulation --mutants
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from outrider.gateway.decoding.generation import Generation
from outrider.gateway.openai import answer_stream
from outrider.gateway.request import start
from outrider.gateway.request.commit_sink import CommitSink
from outrider.shared.api_keys import KeyRing
from outrider.shared.log import commit_scripts
from outrider.shared.log.commit_log import ChoiceLog, RequestLog
from outrider.shared.log.patient_redis import PatientRedis
from outrider.verifier_service.engine import VerifierEngine
from tests.simulation.faults import ALL_FAULTS

Patch = Callable[[], AbstractContextManager[Any]]


def _script(name: str, old: str, new: str) -> Patch:
    text: str = getattr(commit_scripts, name)
    if old not in text:
        raise ValueError(f"{name} has no {old!r}")
    changed = text.replace(old, new)

    def patch() -> AbstractContextManager[Any]:
        scripts = tuple(changed if script == text else script for script in commit_scripts.ALL)
        return mock.patch.multiple(commit_scripts, **{name: changed, "ALL": scripts})

    return patch


def _emits_first() -> AbstractContextManager[Any]:
    """What a client reads may not be in the log yet."""

    async def write_forever(self: Any) -> None:
        while True:
            entry, updates = await self._pending.get()
            try:
                if self._failure is None:
                    for update in updates:
                        await self._updates.put(update)
                    if entry is not None:
                        await self._start.log.append(entry)
                        self._on_logged()
            except Exception as error:
                self._failure = error
            finally:
                self._pending.task_done()

    return mock.patch.object(CommitSink, "_write_forever", write_forever)


def _resumes_one_late() -> AbstractContextManager[Any]:
    """A resumed stream takes one token more for seen than the client has."""
    covers = answer_stream._covers

    def one_more(seen: Any, reached: Any) -> bool:
        return covers(None if seen is None else dataclasses.replace(seen, num_tokens=seen.num_tokens + 1), reached)

    return mock.patch.object(answer_stream, "_covers", one_more)


def _forgets_seen() -> AbstractContextManager[Any]:
    """The first update after a resumption may reach back across what the client has."""
    original = start._started

    def started(record: Any, log: Any, choices: Any, terms: Any, logs: Any, seen: Any) -> Any:
        return original(record, log, choices, terms, logs, {})

    return mock.patch.object(start, "_started", started)


def _epochs_by_term_alone() -> AbstractContextManager[Any]:
    """A term that is given out twice, as Redis has lost it, gives two sessions one epoch."""
    return mock.patch.object(start, "secrets", SimpleNamespace(randbits=lambda num_bits: 0))


def _claims_nothing() -> AbstractContextManager[Any]:
    """A resuming gateway does not raise the term: two gateways write."""

    async def claim(self: RequestLog, choices: Any) -> dict[int, int]:
        return dict.fromkeys(choices, 0)

    return mock.patch.object(RequestLog, "claim", claim)


def _reads_before_claim() -> AbstractContextManager[Any]:
    """What was written between the first look at the log and the claim is not seen."""
    original = RequestLog.read

    async def read_once(self: Any, choices: Any) -> Any:
        if not hasattr(self, "_read_once"):
            self._read_once = await original(self, choices)
        return {choice: self._read_once[choice] for choice in choices}

    return mock.patch.object(RequestLog, "read", read_once)


def _failover_from_the_start_of_the_session() -> AbstractContextManager[Any]:
    """A session that moves continues after what was committed when it was opened."""
    original = dataclasses.replace

    def replace(value: Any, **changes: Any) -> Any:
        if "epoch" in changes and "committed_token_ids" in changes:
            del changes["committed_token_ids"]
        return original(value, **changes)

    return mock.patch("outrider.gateway.decoding.generation.dataclasses.replace", replace)


def _failover_without_grammar() -> AbstractContextManager[Any]:
    """A session that moves is drawn without the request's grammar from there on."""
    original = dataclasses.replace

    def replace(value: Any, **changes: Any) -> Any:
        if "epoch" in changes and "committed_token_ids" in changes:
            changes["sampling_params"] = original(value.sampling_params, grammar=None)
        return original(value, **changes)

    return mock.patch("outrider.gateway.decoding.generation.dataclasses.replace", replace)


def _reads_one_key() -> AbstractContextManager[Any]:
    """Of the keys in the file the last one alone is taken: a client cannot change its key without an interruption."""
    original = KeyRing._load
    return mock.patch.object(KeyRing, "_load", lambda self: original(self)[-1:])


def _leaks_lease() -> AbstractContextManager[Any]:
    """A lost verifier keeps the place that the session had."""
    original = Generation._decode_with_failover

    async def decode(self: Any, *args: Any) -> None:
        marked = self.verifiers.mark_lost

        def mark(member: Any) -> None:
            member.num_sessions += 1
            marked(member)

        with mock.patch.object(self.verifiers, "mark_lost", mark):
            await original(self, *args)

    return mock.patch.object(Generation, "_decode_with_failover", decode)


def _no_restore() -> AbstractContextManager[Any]:
    """An append that does not fit counts as done, and nothing is restored."""

    async def restore(self: RequestLog) -> None:
        return None

    return mock.patch.object(RequestLog, "restore", restore)


def _forgets_held_text() -> AbstractContextManager[Any]:
    """After a log was replayed, the text decoder begins anew: in the middle of a character or of a stop string."""
    original = CommitSink.replay

    async def replay(self: Any) -> bool:
        decoder = self._detokenizer._decoder
        tokenizer = getattr(decoder, "_decoder", decoder)._tokenizer
        fresh = copy.deepcopy(decoder, {id(tokenizer): tokenizer})  # which is shared, and cannot be copied
        finished = await original(self)
        self._detokenizer._decoder = fresh
        return finished

    return mock.patch.object(CommitSink, "replay", replay)


def _ignores_takeover() -> AbstractContextManager[Any]:
    """A gateway that the log refuses goes on, and emits."""
    superseded = property(lambda _self: False, lambda _self, _value: None)
    return mock.patch.object(ChoiceLog, "_is_taken_over", superseded, create=True)


def _session_stays() -> AbstractContextManager[Any]:
    """A verifier frees nothing at the end of a stream."""
    return mock.patch.object(VerifierEngine, "_close")


def _drops_lost_commands() -> AbstractContextManager[Any]:
    """Commands whose connection was lost are not sent again."""

    def postpone(self: Any, calls: Any, error: Exception) -> None:
        for call in calls:
            call.retry_at = float("inf")
            call.problem = str(error)

    return mock.patch.object(PatientRedis, "_postpone", postpone)


MUTANTS: dict[str, Patch] = {
    "append without a look at the fence": _script(
        "APPEND",
        "if superseded(fence, tonumber(ARGV[1]), ARGV[2]) then return 0 end",
        "if true then fence = {ARGV[1], ARGV[2]} end",
    ),
    "a repeated append is appended again": _script(
        "APPEND", "if not is_repeat then\n", "if is_repeat then add(KEYS[1], length(KEYS[1]), 5) else\n"
    ),
    "a claim that leaves the old holder": _script(
        "CLAIM", "redis.call('HSET', KEYS[index], 'term', term, 'holder', ARGV[1])", ""
    ),
    "emit before commit": _emits_first,
    "a resumption one token late": _resumes_one_late,
    "a resumption without a claim": _claims_nothing,
    "a log read before the claim": _reads_before_claim,
    "a failover from the session's start": _failover_from_the_start_of_the_session,
    "a failover without the grammar": _failover_without_grammar,
    "a new key that replaces the old one at once": _reads_one_key,
    "a lease kept by a lost verifier": _leaks_lease,
    "a lost log that is not restored": _no_restore,
    "a superseded gateway that goes on": _ignores_takeover,
    "a session that stays": _session_stays,
    "a command that is not sent again": _drops_lost_commands,
    "a replay that forgets the text held back": _forgets_held_text,
    "a restore without a look at the fence": _script(
        "RESTORE", "if superseded(fence, tonumber(ARGV[1]), ARGV[2]) then return 0 end", ""
    ),
    "a late restore removes what was appended since": _script(
        "RESTORE", "if fence[1] == ARGV[1] and length(KEYS[1]) > end_len then return 1 end", ""
    ),
    "epochs that tell terms apart, not connections": _epochs_by_term_alone,
    "an append behind another gateway's tokens": _script("APPEND", "if is_lost then return -1 end", ""),
    "a resumption that forgets what was seen": _forgets_seen,
}
# The faults that seeds are drawn from for a bug that seeds of all faults hardly ever meet: of 450 one has a client that
# resumes behind the end of its log, which has lost what the client has seen, and rounds must have other lengths too.
_FAULTS_OF: dict[str, tuple[str, ...]] = {"a resumption that forgets what was seen": ("rack-power",)}
# Seeds that found a planted bug, which are tried first. A change to the simulation gives seeds another meaning: then
# other seeds find it, and `--mutants` prints which.
FOUND_BY = {
    "append without a look at the fence": 1,
    "a repeated append is appended again": 0,
    "a claim that leaves the old holder": 10,
    "emit before commit": 0,
    "a resumption one token late": 0,
    "a resumption without a claim": 0,
    "a log read before the claim": 21,
    "a failover from the session's start": 0,
    "a failover without the grammar": 4,
    "a new key that replaces the old one at once": 11,
    "a lease kept by a lost verifier": 0,
    "a lost log that is not restored": 34,
    "a superseded gateway that goes on": 1,
    "a session that stays": 0,
    "a command that is not sent again": 0,
    "a replay that forgets the text held back": 63,
    "a restore without a look at the fence": 67,
    "a late restore removes what was appended since": 34,
    "epochs that tell terms apart, not connections": 1,
    "an append behind another gateway's tokens": 12,
    "a resumption that forgets what was seen": 124,
}


def faults_for(name: str) -> tuple[str, ...]:
    """Returns the kinds of faults that a planted bug is looked for with."""
    return _FAULTS_OF.get(name, ALL_FAULTS)


def seeds_for(name: str, num_seeds: int) -> Iterable[int]:
    """Yields the seed that found the bug before, then the first num_seeds."""
    if name in FOUND_BY:
        yield FOUND_BY[name]
    yield from range(num_seeds)
