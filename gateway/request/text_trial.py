"""Tries a checkpoint's chat templates and the rules of its tokenizer on short texts, in a process of its own.

A template is a program, and a tokenizer has regular expressions. Both run in the gateway's event loop, where nothing
stops a loop without end, a text of gigabytes or a pattern that backtracks. They are tried on one conversation and on
runs of single characters: what a checkpoint does to other texts alone is not found.

The process is `python -m outrider.gateway.request.text_trial FOLDER`; it writes what it tries, and ends with 0.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import tokenizers

from outrider.gateway.request.chat_template import PROBE, ChatTemplate
from outrider.gateway.request.tokenizer import chat_templates, special_tokens_of
from outrider.shared.checkpoint.json_file import read_object
from outrider.shared.errors import ConfigError, InvalidRequest

# seconds of CPU, and of wall clock on a busy machine; the whole process; a tokenizer.json of 33 MB takes 0.8
_CPU_S, _CLOCK_S = 3, 60
# bytes; address space of the process; a tokenizer.json of 33 MB takes 0.25 GB
_MEMORY_BYTES = 2**30
# characters; of a prompt of six short messages; chosen: a text of that length takes more room than most contexts have
_MAX_PROMPT_CHARS = 2**20
# characters, and seconds of CPU; one run: half of what is tokenized in the event loop; Llama 3's pattern takes 0.005 s
_RUN_CHARS, _RUN_S = 16 * 1024, 0.25
_RUNS = ("a", "0", "!", " ", "\n", "a ")
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def try_texts(folder: str) -> None:
    """Raises ConfigError that names the part which takes too much."""
    command = [sys.executable, "-P", "-m", __name__, folder]
    # A thread per core would take an address space of its own.
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    try:
        tried = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_CLOCK_S, check=False)
        is_good, parts = tried.returncode == 0, tried.stdout.splitlines()
    except subprocess.TimeoutExpired as error:
        is_good, parts = False, (error.stdout or b"").decode().splitlines()
    if not is_good:
        part = parts[-1] if parts else "text"
        raise ConfigError(f"{folder}: its {part} fails on short texts, or takes too much time or memory for them")


def _try_templates(folder: Path) -> None:
    config = read_object(folder / "tokenizer_config.json")
    for source in chat_templates(folder, config).values():
        template = ChatTemplate(source, special_tokens_of(config))
        for tools in (None, [_TOOL]):
            try:
                text = template.render(PROBE, tools=tools)
            except InvalidRequest as error:  # a template may refuse any conversation
                if isinstance(error.__cause__, MemoryError):
                    sys.exit(1)
                continue
            if len(text) > _MAX_PROMPT_CHARS:
                sys.exit(1)


def _try_rules(folder: Path) -> None:
    """Tries what comes before the vocabulary: it is not loaded."""
    rules = read_object(folder / "tokenizer.json")
    rules |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    rules["model"] = {"type": "BPE", "vocab": {}, "merges": []}
    backend = tokenizers.Tokenizer.from_str(json.dumps(rules))
    for run in _RUNS:
        started = time.process_time()
        backend.encode_batch_fast([(run * _RUN_CHARS)[:_RUN_CHARS] + "?"])  # patterns backtrack where a run ends
        if time.process_time() - started > _RUN_S:
            sys.exit(1)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    folder = Path(sys.argv[1])
    for part, attempt in (("chat template", _try_templates), ("tokenizer", _try_rules)):
        print(part, flush=True)
        try:
            attempt(folder)
        except ConfigError:
            return  # the gateway says the same, with its reason, when it loads the file


if __name__ == "__main__":
    main()
