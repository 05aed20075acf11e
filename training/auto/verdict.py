"""Measures whether a head pays on this machine: a stack answers held-out questions with the head and without.

Every answer must be the same, so this checks as well that nothing is lost. Not here: the stack (pipeline.py).
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.client.bench.run import BenchRun, BenchSettings, run_bench
from outrider.client.rest import rest_client, served_model
from outrider.shared.errors import OutriderError
from outrider.training.auto.config import DRAFT_LEN, METHOD
from outrider.training.errors import ServerError
from outrider.training.progress import Progress

# drafted tokens that are tried; at small batches of a small target few pay, for a large one more
_DRAFT_LENS = (1, 2, 3, DRAFT_LEN)
# times all ways are asked the same; by turns, as machines change their speed
_MOST_ROUNDS = 3
# questions of a round, and tokens of an answer; enough to tell a tenth
_NUM_QUESTIONS, _MAX_TOKENS = 6, 128
# factor; a gain below it is not told from the noise of a machine
_PAYS = 1.05
_PLAIN = 0


@dataclass(frozen=True)
class Verdict:
    """draft_len: the best number of drafted tokens. Rates in tokens per second of one stream."""

    plain: float
    with_head: float
    draft_len: int
    tokens_per_round: float
    rates: Mapping[str, float]

    @property
    def pays(self) -> bool:
        return self.with_head >= _PAYS * self.plain

    def sentence(self) -> str:
        figures = (
            f"{self.with_head:.0f} tokens/s with {self.draft_len} drafted a round ({self.tokens_per_round:.2f} tokens "
            f"a round), {self.plain:.0f} without the head, the same answers"
        )
        ratio = f"{self.with_head / self.plain:.2f} times plain decoding"
        return f"It pays on this machine, {ratio}: {figures}." if self.pays else (
            f"It does not pay on this machine, {ratio} at best: {figures}."
        )  # fmt: skip

    def serve_line(self, model: str, head: Path) -> str:
        if not self.pays:
            return f"outrider serve {shlex.quote(model)}"
        speculation = {"method": METHOD, "model": str(head), "num_speculative_tokens": self.draft_len}
        return f"outrider serve {shlex.quote(model)} --speculative-config {shlex.quote(json.dumps(speculation))}"


async def measure(url: str, held_out: Path, limit_s: float, seed: int, progress: Progress) -> Verdict:
    """limit_s: none begins later. Raises ServerError: a request failed, OutriderError: answers differ."""
    settings = _settings(url, held_out, seed)
    runs: dict[int, list[BenchRun]] = {length: [] for length in (_PLAIN, *_DRAFT_LENS)}
    began = time.monotonic()
    progress.start(_MOST_ROUNDS * len(runs) * settings.num_prompts)
    for _ in range(_MOST_ROUNDS):
        for length in runs:
            asked = replace(settings, method=METHOD if length else "off", num_speculative_tokens=length)
            runs[length].append(await run_bench(asked, lambda _result: progress.advance()))
        if time.monotonic() - began >= limit_s:
            break
    progress.stop()
    _require_same(runs)
    rates = {length: _rate(of_length) for length, of_length in runs.items()}
    best = max(_DRAFT_LENS, key=lambda length: rates[length])
    accepted = [run.acceptance for run in runs[best] if run.acceptance is not None]
    mean = sum(part.length for part in accepted) / max(1, len(accepted))
    named = {str(length) if length else "off": round(rate, 1) for length, rate in rates.items()}
    return Verdict(rates[_PLAIN], rates[best], best, round(mean, 2), named)


def _settings(url: str, held_out: Path, seed: int) -> BenchSettings:
    """The questions go into a file of their own, with this measurement's number of tokens."""
    rows = [json.loads(row) for row in held_out.read_text(encoding="utf-8").splitlines()[:_NUM_QUESTIONS]]
    is_chat = "messages" in rows[0]
    questions = held_out.with_name("measured.jsonl")
    fields = "messages" if is_chat else "prompt"
    questions.write_text(
        "".join(json.dumps({fields: row[fields], "max_tokens": _MAX_TOKENS}) + "\n" for row in rows), encoding="utf-8"
    )
    with rest_client(url, "") as client:
        model = served_model(client)
    return BenchSettings(
        base_url=url,
        model=model,
        endpoint="/v1/chat/completions" if is_chat else "/v1/completions",
        num_prompts=len(rows),
        max_concurrency=1,
        dataset_path=questions,
        seed=seed,
    )


def _rate(runs: list[BenchRun]) -> float:
    results = [result for run in runs for result in run.results]
    return sum(result.num_output_tokens for result in results) / max(1e-9, sum(result.seconds for result in results))


def _require_same(runs: Mapping[int, list[BenchRun]]) -> None:
    results = [run.results for of_length in runs.values() for run in of_length]
    for failed in (result for run in results for result in run if result.error):
        raise ServerError(f"a request failed: {failed.error}")
    texts = [[result.text for result in run] for run in results]
    if any(text != texts[0] for text in texts):
        raise OutriderError("answers differ with the head and without; please report this")
