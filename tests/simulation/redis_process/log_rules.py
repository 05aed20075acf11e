"""What a script of the commit log may do to it, whatever has been lost, and what would happen if one came late.

The promises of shared/log/commit_scripts.py as rules over the log before and after: a fault in a script breaks one at
once, long before a client could see it. Beside each change another one is tried on a copy of the log: a message of
before comes again, as it may when its sender gave a connection up and sent it on another; or this one comes to the log
as it was a while before, as it may when Redis has lost the writes since.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from outrider.gateway.request.record import SessionRecord
from outrider.gateway.request.start import EPOCHS_PER_TERM
from outrider.shared.sampling_params import SpeculationMode
from tests.simulation.redis_process.store import RedisStore, Stream

# Term and holder; -1 and nobody where there is none.
Fence: TypeAlias = tuple[int, bytes]
# Index of the first token, number of tokens, their bytes, finish reason, epoch, extras.
Entry: TypeAlias = tuple[bytes, ...]
# changes of one log; whose messages may come again, and whose writes may be lost
_MOST_KEPT = 16
WRITERS = ("APPEND", "RESTORE")


@dataclass(frozen=True)
class Written:
    """One choice's log and fence."""

    fence: Fence
    entries: tuple[Entry, ...]

    @property
    def num_tokens(self) -> int:
        return int(self.entries[-1][0]) + int(self.entries[-1][1]) if self.entries else 0


@dataclass(frozen=True)
class Message:
    """A script's run: APPEND or RESTORE, its whole command, and what the sender says it is."""

    name: str
    command: list[bytes]

    @property
    def log(self) -> bytes:
        return self.command[3]

    @property
    def sender(self) -> Fence:
        return int(self._args[0]), self._args[1]

    @property
    def _args(self) -> list[bytes]:
        return self.command[3 + int(self.command[2]) :]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What it is to write."""
        fields = self._args[3:9] if self.name == "APPEND" else self._args[4:]
        return tuple(tuple(fields[first : first + 6]) for first in range(0, len(fields), 6))


def broken_rule(message: Message, before: Written, after: Written) -> str:
    """Returns the rule that the change breaks; "": none."""
    fence = before.fence
    if fence[0] > message.sender[0] or (fence[0] == message.sender[0] and fence[1] != message.sender[1]):
        return "" if after == before else "a gateway that is superseded has written"
    if after == before:
        return ""
    if after.fence != message.sender:
        return f"the fence has become {after.fence}, not the writer's"
    if message.name == "RESTORE":
        if after.entries != message.entries:
            return "a restored log is not its writer's"
        is_shorter = fence == message.sender and after.num_tokens < before.num_tokens
        return "a late restore has removed what its sender has appended since" if is_shorter else ""
    (entry,) = message.entries
    if after.entries != (*before.entries, entry):
        return "an append has changed what was there, or has not added its entry"
    if int(entry[0]) != before.num_tokens:
        return "an append leaves a gap, or repeats tokens"
    if before.entries and fence != message.sender:
        return "an append stands behind tokens that its writer may not have"
    return ""


@functools.lru_cache(maxsize=64)
def is_exact(record: bytes, choice: int) -> bool:
    """Returns whether each connection comes to the same tokens of a choice."""
    session = SessionRecord.decode(record)
    return session.modes[session.place(choice)[0]] is SpeculationMode.EXACT


@dataclass
class LogRules:
    """Watches one simulation's Redis over all its restarts. tell: called with each rule that is broken."""

    rng: random.Random
    tell: Callable[[str], None]
    is_exact: Callable[[bytes, int], bool] = is_exact
    # By log: messages that changed it, each with what was there then.
    _past: dict[bytes, list[tuple[Message, RedisStore]]] = field(default_factory=dict)
    _writers: dict[tuple[bytes, int], bytes] = field(default_factory=dict)  # of each epoch in a log

    def ran(self, message: Message, before: Written, store: RedisStore) -> None:
        """To be called after each run, with what was there before it."""
        after = written(store, message)
        self._check(message, before, after, "")
        if after == before:
            return
        if message.name == "APPEND":
            self._check_epoch(message, store)
        past = self._past.setdefault(message.log, [])
        keys = message.command[3 : 3 + int(message.command[2])]
        if past:
            earlier, then = self.rng.choice(past)
            if self.rng.random() < 0.5:
                self._try(earlier, store, "if it came again now: ")
            else:
                self._try(message, then, "if Redis had lost what was written before: ")
        past.append((message, store.copy(keys)))
        del past[:-_MOST_KEPT]

    def _try(self, message: Message, store: RedisStore, when: str) -> None:
        copied = store.copy(message.command[3:6])
        before = written(copied, message)
        copied.run(message.command)
        self._check(message, before, written(copied, message), when)

    def _check(self, message: Message, before: Written, after: Written, when: str) -> None:
        rule = broken_rule(message, before, after)
        if rule:
            term, holder = message.sender
            self.tell(f"{when}{message.name} {message.log.decode()} of term {term}, {holder.decode()}: {rule}")

    def _check_epoch(self, message: Message, store: RedisStore) -> None:
        """An epoch is one connection's, even if a term is given out twice: or a client could not tell its tokens from
        others that were drawn in their place.
        """
        (term, holder), entry = message.sender, message.entries[0]
        epoch = int(entry[4]) - term * EPOCHS_PER_TERM
        choice = int(message.log.split(b":")[-2])
        if (
            not self.is_exact(store.peek(message.command[5]), choice)
            and self._writers.setdefault((message.log, epoch), holder) != holder
        ):
            self.tell(f"{message.log.decode()}: two connections write under the epoch {entry[4].decode()}")


def written(store: RedisStore, message: Message) -> Written:
    """Returns what the message is about, as it stands there now."""
    stream, fence = store.peek(message.command[3]), store.peek(message.command[4])
    entries = stream.entries if isinstance(stream, Stream) else []
    holder = fence if isinstance(fence, dict) else {}
    return Written(
        (int(holder.get(b"term", b"-1")), holder.get(b"holder", b"")),
        tuple((b"%d" % (entry_id[0] - 1), *fields[1::2]) for entry_id, fields in entries),
    )
