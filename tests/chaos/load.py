"""What is asked for, once undisturbed and then again in trouble, and how the two are compared.

Not here: the trouble (storm.py, faults.py, scaling.py).
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.client import Received, Refused, fetch

PROMPTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):",
    "for name in names:\n    print(name)\nfor name in",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
)
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.1, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.3},
)
METHODS = ("draft_model", "ngram", "auto", "off")
_DEADLINE_S = 600.0


@dataclass
class Report:
    num_requests: int = 0
    mismatches: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_reconnects: int = 0
    stalls_s: list[float] = field(default_factory=list)
    misfortunes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    leftovers: list[str] = field(default_factory=list)

    def stall_s(self, quantile: float) -> float:
        """Of the longest pause between two events of each request."""
        if len(self.stalls_s) < 2:
            return max(self.stalls_s, default=0.0)
        return statistics.quantiles(self.stalls_s, n=1000, method="inclusive")[min(998, int(quantile * 1000) - 1)]


@dataclass(frozen=True)
class Load:
    num_requests: int
    num_at_once: int
    num_tokens: int
    mean_pause_s: float
    seed: int


def request_body(index: int, load: Load, method: str) -> dict[str, Any]:
    return {
        "prompt": PROMPTS[index % len(PROMPTS)],
        **PARAMS[index // len(PROMPTS) % len(PARAMS)],
        "max_tokens": load.num_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "speculation": {"method": method, "num_speculative_tokens": 1 + index % 5},
    }


async def fetch_references(urls: Sequence[str], load: Load) -> list[Received]:
    count = len(PROMPTS) * len(PARAMS)
    rng = random.Random(0)
    return await asyncio.gather(
        *(
            fetch(urls, f"reference-{load.seed}-{index}", request_body(index, load, "off"), rng, 300.0)
            for index in range(count)
        )
    )


async def compared_request(
    urls: Sequence[str], load: Load, index: int, references: Sequence[Received], report: Report
) -> None:
    """One request in trouble; what is wrong with its answer goes into the report."""
    rng = random.Random(load.seed * 1_000_003 + index)
    body = request_body(index, load, METHODS[rng.randrange(len(METHODS))])
    if rng.random() < 0.5:
        body["speculation"]["token_tree"] = True
    expected = references[index % len(references)]
    try:
        received = await fetch(urls, f"chaos-{load.seed}-{index}", body, rng, _DEADLINE_S)
    except TimeoutError:
        report.failures.append(f"request {index}: no end within {_DEADLINE_S:g} s")
        return
    except Refused as refusal:
        report.failures.append(f"request {index}: {refusal}")
        return
    report.num_reconnects += received.num_reconnects
    report.stalls_s.append(max(received.stalls_s, default=0.0))
    if (received.token_ids, received.text, received.finish_reason) != (
        expected.token_ids,
        expected.text,
        expected.finish_reason,
    ):
        pairs = zip(expected.token_ids, received.token_ids, strict=False)
        place = next((index for index, (wanted, found) in enumerate(pairs) if wanted != found), -1)
        report.mismatches.append(
            f"request {index}: {len(received.token_ids)} of {len(expected.token_ids)} tokens, first difference at "
            f"{place}, finish {received.finish_reason}; {received.problems[-2:]}"
        )
