"""Compiles grammars on trial, in a process that a hostile one may kill; grammar_check.py starts it by this file's path.

Reads one JSON string a line, a grammar for llguidance, and answers one JSON value a line: null, or the reason why it is
invalid. The kernel ends the process at the limits: SIGPROF at the CPU time, SIGALRM at the wall-clock time, a failed
allocation at the memory. The process ends with its parent: at the end of its input, or at one of these limits.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def main(arguments: str) -> None:
    """Answers grammars from standard input. `arguments`: a JSON object with the fields that grammar_check.py gives."""
    asked = json.loads(arguments)
    os.nice(asked["niceness"])
    tokenizer = LLTokenizer(asked["tokenizer"], n_vocab=asked["vocab_size"], eos_token=asked["eos_token_ids"])
    limits = LLParserLimits(**asked["parser_limits"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = Path("/proc/self/statm")
    if pages.is_file():  # Linux
        memory = int(pages.read_text().split()[0]) * resource.getpagesize() + asked["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, asked["cpu_s"])
        signal.setitimer(signal.ITIMER_REAL, asked["clock_s"])
        answer = _compile(tokenizer, json.loads(line), limits)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        print(json.dumps(answer), flush=True)


def _compile(tokenizer: LLTokenizer, source: str, limits: LLParserLimits) -> str | None:
    """Returns why the grammar is invalid, or None. Computes the first row's mask too, since that does lazy work."""
    try:
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
    except ValueError as error:
        return str(error)
    return matcher.get_error() if matcher.is_error() else None


if __name__ == "__main__":
    main(sys.argv[1])
