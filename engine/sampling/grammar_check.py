"""Checks that a grammar compiles within limits, in a separate process, before the service compiles it.

`{"type": "integer", "multipleOf": 1000003}` takes llguidance 8 s and 200 MB, and nothing stops it: it would block a
service that compiled it directly.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from llguidance import LLParserLimits

from outrider.shared.errors import InvalidRequest, OutriderError, Overloaded, Unavailable
from outrider.shared.sampling_params import REMARK

# seconds of CPU; limit for compiling one grammar; schemas of 200 fields and choices of 1,000 texts take 0.005
_CPU_S = 1.0
# seconds of wall clock; limit for compiling one grammar on a busy machine
_CLOCK_S = 10.0
# bytes; limit for one grammar, in addition to the tokenizer; the same schemas take 2 MB
_MEMORY_BYTES = 64 * 2**20
# grammars; most that may wait for the process, at _CPU_S each
_MAX_WAITING = 8
# nice value of the process; forwards go first
_NICENESS = 10
# llguidance's units of work; a quarter of its defaults for one row's mask, its defaults for the rest
PARSER_LIMITS = LLParserLimits(step_lexer_fuel=50_000, step_max_items=12_500, max_lexer_states=62_500)
_LIMITED = ("step_lexer_fuel", "step_max_items", "max_lexer_states")
# The line of the grammar that a message points to with a caret below, and its remark.
_PLACE = re.compile(rf"\n *\d+ \| (.*) {REMARK}(\w+): (.*)\n *\^")
# The field of a remark and the name of its part, without the place within that.
_REMARK = re.compile(rf" {REMARK}(\w+): ([^:\n]*)")
# names; parts of a request that one message names; more would hide its reason
_MAX_NAMED = 8
_POSITION = re.compile(r"^at \d+\(\d+\): ")
_CHILD = Path(__file__).with_name("grammar_child.py")


class GrammarCheck:
    """Checks one tokenizer's grammars. The process starts with the first one, and again after one that killed it."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._arguments = json.dumps(
            {
                "tokenizer": str(tokenizer),
                "vocab_size": vocab_size,
                "eos_token_ids": list(eos_token_ids),
                "parser_limits": {name: getattr(PARSER_LIMITS, name) for name in _LIMITED},
                "niceness": _NICENESS,
                "cpu_s": _CPU_S,
                "clock_s": _CLOCK_S,
                "memory_bytes": _MEMORY_BYTES,
            }
        )
        self._room = threading.BoundedSemaphore(_MAX_WAITING)
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Admits one grammar at a time, from any thread. Raises Overloaded when too many wait already."""
        if not self._room.acquire(blocking=False):
            raise Overloaded(f"{_MAX_WAITING} grammars wait to be compiled; try again later")
        try:
            with self._lock:
                yield
        finally:
            self._room.release()

    def check(self, source: str) -> None:
        """Compiles a grammar in the process; must be called within a turn.

        It waits for the process, so it must not be called in an event loop. Raises InvalidRequest with the reason or
        the limit, Overloaded on a machine that is too busy, Unavailable when the process does not stay alive.
        """
        for _ in range(2):
            child = self._child or self._start()
            with contextlib.suppress(OSError):  # it had ended before
                child.stdin.write(json.dumps(source).encode() + b"\n")  # type: ignore[union-attr]
                child.stdin.flush()  # type: ignore[union-attr]
            answer = child.stdout.readline()  # type: ignore[union-attr]
            if answer.endswith(b"\n"):
                if (error := json.loads(answer)) is not None:
                    raise refusal(error)
                return
            self._child = None
            self._end_child()
            if child.returncode not in (-signal.SIGKILL, -signal.SIGTERM):  # from outside: no word on this grammar
                raise _limit(child.returncode, source)
        raise Unavailable("the process that compiles grammars is killed again and again; see the system's log")

    def _start(self) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C in a terminal reaches only the service, whose end closes the process's input.
        self._child = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD), self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._end_child = weakref.finalize(self, _end, self._child)  # at this process's end at the latest
        return self._child


def refusal(error: str) -> InvalidRequest:
    """Returns llguidance's message without the parser's state and the grammar's lines, which follow it.

    A caller's schema is part of a grammar that the caller has never seen. Where the rule has a REMARK, the part of the
    request that it is from is named, and in its schema the path to a pattern that is no regex.
    """
    text = re.split(r"<state>|\n *\d+ \| ", error, maxsplit=1)[0].rstrip()
    place = _PLACE.search(error)
    if place is None:
        return InvalidRequest(f"grammar: {text}", param="grammar")
    rule, field, part = place.groups()
    path = _path_of_pattern(rule, text)
    text = _POSITION.sub("", text)
    return InvalidRequest(f"{field}: {part}: {f'{path}: ' if path else ''}{text}", param=field)


def _path_of_pattern(rule: str, message: str) -> str:
    """Returns the path, in the schema of a rule, to the pattern that the message quotes; "" if there is none."""
    _, found, schema = rule.partition(" %json ")
    waiting: list[tuple[str, object]] = []
    if found:
        with contextlib.suppress(ValueError):
            waiting = [("", json.JSONDecoder().raw_decode(schema)[0])]
    while waiting:
        path, value = waiting.pop()
        if not isinstance(value, (dict, list)):
            continue
        if isinstance(value, dict) and f"\n    {value.get('pattern')}\n" in message:
            return path.removeprefix(".")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        waiting += [(path if key == "properties" else f"{path}.{key}", entry) for key, entry in items]
    return ""


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the process by closing its input; a limit ends it if it is still compiling."""
    with contextlib.suppress(OSError), child:  # input that it no longer reads
        pass


def _limit(status: int, source: str) -> OutriderError:
    """Returns the error of a grammar that a limit ended, which names the parts of the request that rules are from."""
    if status == -signal.SIGALRM:
        return Overloaded(f"compiling the grammar took more than {_CLOCK_S:g} s on a busy machine; try again later")
    over = f"{_CPU_S:g} s" if status == -signal.SIGPROF else f"{_MEMORY_BYTES // 2**20} MiB"
    found = _REMARK.findall(source)
    if not found:
        what, param = "grammar (response_format, structured_outputs)", "grammar"
    else:
        param, parts = found[0][0], list(dict.fromkeys(part for _, part in found))
        more = f" and {len(parts) - _MAX_NAMED} more" if len(parts) > _MAX_NAMED else ""
        what = f"{param}: {', '.join(parts[:_MAX_NAMED])}{more}"
    return InvalidRequest(
        f"{what}: compiling this grammar takes more than {over}, the limit; make it simpler", param=param
    )
