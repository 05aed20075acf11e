"""The full table of receipts: how many answers of a running fleet are confirmed, and which changes are found.

python -m tests.audit.receipts --answers 1000

A fifth of the answers each is greedy, sampled at T = 1, held by a grammar, a tool call, and one whose verifier was
killed in its midst. Then one token is changed; the answer is claimed for another request (seed, temperature, top_p,
penalty); and for other arithmetic, with that said in the receipt or not. Where the other request draws the very same
tokens, which the fleet shows without drafts, there is nothing to find; likewise where other arithmetic confirms every
token. Lines of progress have the time since the start. Last comes what verifying costs beside generating the same
tokens plainly: processor time in one process, each answer seen for the first time by both.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import dataclasses
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file, save_file

from outrider.client.audit.session import PROMPTS
from outrider.gateway.answers.check import Verification
from outrider.gateway.answers.read import read_answer
from outrider.gateway.openai.receipt import Receipt
from outrider.offline.llm import LLM
from outrider.offline.verify import ReceiptVerifier
from outrider.shared.request_params import SamplingParams
from tests.chaos.fleet import START_TIMEOUT_S, Fleet, Part
from tests.chaos.targets import MODELS
from tests.e2e.e2e_pace import FEW_AHEAD, paced

TARGET = MODELS / "demo-target"
METHODS = ("draft_model", "ngram", "suffix", "auto", "off")
# requests at once; of those whose verifier is killed, all are in their midst then
WIDTH = 25
# seconds; per reply of Redis: what a stream needs to be in its midst when the verifier is killed
PAUSE_S = 0.02
# Kinds, tokens and number of the answers whose cost is compared, with nothing but the model.
_TIMED, _TIMED_TOKENS, _NUM_TIMED = ("greedy", "T = 1"), 128, 12
# tokens of the others, unless their kind says more
_TOKENS = 16
# answers; between two tables of a long run
_SHOWN_EVERY = 100
NOTE = {
    "type": "object",
    "properties": {"title": {"enum": ["one", "two"]}, "text": {"type": "string", "pattern": "^[a-z ]{20,40}$"}},
    "required": ["title", "text"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "T = 1": {"temperature": 1.0},
    "grammar": {"temperature": 1.0, "max_tokens": 64, "structured_outputs": {"json": NOTE}},
    "tools": {
        "temperature": 1.0,
        "max_tokens": 64,
        "tools": [{"type": "function", "function": {"name": "note", "parameters": NOTE}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    "killed verifier": {"temperature": 1.0, "max_tokens": 96, "ignore_eos": True, "stream": True},
}


# What a changed request says instead.
CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "seed": lambda body: {"seed": body["seed"] + 1_000_000},
    "temperature": lambda body: {"temperature": 0.95 * body["temperature"] or 0.5},
    "top_p": lambda body: {"top_p": 0.9},
    "penalty": lambda body: {"presence_penalty": 0.5},
}


class OneVerifier(Fleet):
    """A verifier with drafts of its own, a drafter and two gateways, the first with a slow Redis."""

    paced_url = ""

    def _service_command(self, kind: str, index: int) -> list[str]:
        local = ["--local-methods", "ngram,suffix"] if kind == "verifier" else []
        return [*super()._service_command(kind, index), *local]

    def _gateway_command(self) -> list[str]:
        slow = [] if self.of_kind("gateway") else ["--redis-url", self.paced_url, *FEW_AHEAD]
        return [*super()._gateway_command(), *slow]

    async def wait_ready(self, *clients: httpx.AsyncClient) -> None:
        await self.wait_serving(self.parts["verifier-0"])
        async with asyncio.timeout(START_TIMEOUT_S):
            for http in clients:
                while (await http.get("/ready")).status_code != 200:  # noqa: ASYNC110 only asking tells
                    await asyncio.sleep(0.1)


def request(kind: str, number: int) -> dict[str, Any]:
    text = f"# {number}\n{PROMPTS[number % len(PROMPTS)]}"
    prompt = {"messages": [{"role": "user", "content": text}]} if kind == "tools" else {"prompt": text}
    method = METHODS[number % len(METHODS)]
    speculation = {"method": method} if method in ("auto", "off") else {"method": method, "num_speculative_tokens": 4}
    num_tokens = _TIMED_TOKENS if number < _NUM_TIMED and kind in _TIMED else _TOKENS
    asked = {"seed": number, "max_tokens": num_tokens, "speculation": speculation, "receipt": True}
    return {**prompt, **asked, **KINDS[kind]}


async def ask(http: httpx.AsyncClient, body: dict[str, Any], pieces: list[str]) -> dict[str, Any]:
    """The answer. `pieces` has the parts of its text that have come."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with http.stream("POST", path, json=body) as reply:
        async for piece in reply.aiter_text():
            pieces.append(piece)
    assert reply.status_code == 200, pieces
    return read_answer("".join(pieces), "the answer")


async def ask_all(http: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return await asyncio.gather(*(ask(http, body, []) for body in bodies))


async def ask_all_of(http: httpx.AsyncClient, bodies: list[dict[str, Any]], killed: Part) -> list[Any]:
    """The answers; None for one that had ended when the verifier died in the midst of the others."""
    seen: list[list[str]] = [[] for _ in bodies]
    tasks = [asyncio.create_task(ask(http, body, pieces)) for body, pieces in zip(bodies, seen, strict=True)]
    while not all(len(pieces) > 1 for pieces in seen) and not any(task.done() for task in tasks):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    early = [task.done() for task in tasks]
    killed.kill()
    killed.start()
    answers = await asyncio.gather(*tasks)
    return [None if ended else answer for ended, answer in zip(early, answers, strict=True)]


@dataclass(frozen=True)
class Case:
    """others: the answers to changed requests, without drafts, by what was changed."""

    kind: str
    answer: dict[str, Any]
    others: dict[str, dict[str, Any]]


async def collect(num_answers: int, folder: Path) -> AsyncIterator[list[Case]]:
    """Yields a batch of each kind in turn, so that a run that is cut short has seen all of them."""
    fleet = OneVerifier(folder, num_gateways=2, num_drafters=1, num_verifiers=1)
    with paced(fleet.redis.port, PAUSE_S) as fleet.paced_url:
        async with fleet, AsyncExitStack() as clients:
            slow, http = [
                await clients.enter_async_context(httpx.AsyncClient(base_url=url, timeout=START_TIMEOUT_S))
                for url in fleet.urls
            ]
            numbers = range(num_answers // len(KINDS))
            for batch in (numbers[start : start + WIDTH] for start in numbers[::WIDTH]):
                for kind in KINDS:
                    await fleet.wait_ready(slow, http)
                    bodies = [request(kind, number) for number in batch]
                    if kind == "killed verifier":
                        answers = await ask_all_of(slow, bodies, fleet.parts["verifier-0"])
                    else:
                        answers = await ask_all(http, bodies)
                    await fleet.wait_ready(slow, http)
                    off = {"speculation": {"method": "off"}, "stream": False}
                    others = {
                        name: await ask_all(http, [{**body, **off, **change(body)} for body in bodies])
                        for name, change in CHANGES.items()
                    }
                    yield [
                        Case(kind, answer, {name: entries[place] for name, entries in others.items()})
                        for place, answer in enumerate(answers)
                        if answer is not None
                    ]


def claimed_for(answer: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The answer with the other's receipt, which is made to name the answer's tokens."""
    return {**answer, "receipt": {**other["receipt"], "token_ids": answer["receipt"]["token_ids"]}}


def claimed_of(answer: dict[str, Any], numerics: str) -> dict[str, Any]:
    """The answer with a receipt that names other numerics."""
    receipt = Receipt.parse(answer["receipt"])
    other = dataclasses.replace(receipt, record=dataclasses.replace(receipt.record, numerics=numerics))
    return {**answer, "receipt": dict(other.body())}


@contextmanager
def eight_bits(model: Path) -> Iterator[Path]:
    """The model with its matrices rounded to 255 levels per row."""
    with tempfile.TemporaryDirectory() as folder:
        rounded = shutil.copytree(model, Path(folder) / "rounded")
        tensors = load_file(model / "model.safetensors")
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                scale = tensor.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-9) / 127
                tensors[name] = ((tensor.float() / scale).round() * scale).to(tensor.dtype).contiguous()
        save_file(tensors, rounded / "model.safetensors", {"format": "pt"})
        yield rounded


class Table:
    """Counts of outcomes, by what was claimed."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        # seconds of processor time: of generating plainly, and of verifying; tokens of both
        self.generating_s, self.verifying_s, self.num_timed = 0.0, 0.0, 0
        self._random = random.Random(1)
        self._models = ExitStack()
        rounded = self._models.enter_context(eight_bits(TARGET))
        self._right = self._load(TARGET)
        self._plain = self._models.enter_context(LLM(TARGET, use_tqdm_on_load=False))
        self._wrong = {
            "dtype: float32": self._load(TARGET, dtype="float32"),
            "weights of 8 bits": self._load(rounded),
            "KV cache of 8 bits": self._load(TARGET, kv_cache_dtype="int8"),
        }

    def close(self) -> None:
        self._models.close()

    def _load(self, model: Path, **arguments: Any) -> ReceiptVerifier:
        return self._models.enter_context(ReceiptVerifier(model, use_tqdm_on_load=False, **arguments))

    def _count(self, name: str, outcome: str) -> None:
        self.counts.setdefault(name, Counter())[outcome] += 1

    def add_all(self, cases: list[Case]) -> None:
        for case in cases:
            self.add(case)

    def add(self, case: Case) -> None:
        answer, started = case.answer, time.process_time()
        found = self._right.verify(answer)
        if case.kind in _TIMED and found.num_tokens == _TIMED_TOKENS:
            self._time_plain(answer, time.process_time() - started)
        self._count(
            f"as it came: {case.kind}", "confirmed" if found.exit_code == 0 else f"NOT CONFIRMED: {found.conclusion}"
        )
        changed = copy.deepcopy(answer)
        token_ids = changed["receipt"]["token_ids"][0]
        place = self._random.randrange(len(token_ids))
        token_ids[place] ^= self._random.randrange(1, 4096)
        is_named = f"token {place} of choice 0 is" in self._right.verify(changed).wrong
        self._count("a token", "found" if is_named else "NOT FOUND")
        for name, other in case.others.items():
            if other["receipt"]["token_ids"] == answer["receipt"]["token_ids"]:
                self._count(name, "the same tokens")
            else:
                self._count(name, _found(self._right.verify(claimed_for(answer, other))))
        for name, verifier in self._wrong.items():
            is_other = verifier.verify(answer).exit_code == 3
            self._count(f"{name}, said", "found" if is_other else "NOT FOUND")
            is_wrong = verifier.verify(claimed_of(answer, verifier.numerics)).exit_code == 1
            self._count(f"{name}, not said", "found" if is_wrong else "the same tokens")

    def _time_plain(self, answer: dict[str, Any], verifying_s: float) -> None:
        record = Receipt.parse(answer["receipt"]).record
        request = record.prepared.requests[0]
        params = request.sampling_params
        plain = SamplingParams(temperature=params.temperature, seed=params.seed, max_tokens=params.max_tokens)
        started = time.process_time()
        self._plain.generate({"prompt_token_ids": list(request.prompt_token_ids)}, plain, use_tqdm=False)
        self.generating_s += time.process_time() - started
        self.verifying_s += verifying_s
        self.num_timed += 1

    @property
    def is_right(self) -> bool:
        return not any(outcome.startswith("NOT") for counts in self.counts.values() for outcome in counts)

    def show(self) -> None:
        for name, counts in self.counts.items():
            print(f"{name:34s} {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}")
        if self.num_timed:
            print(
                f"{self.num_timed} answers of {_TIMED_TOKENS} tokens, processor seconds: {self.generating_s:.2f} to "
                f"generate, {self.verifying_s:.2f} to verify, {self.generating_s / self.verifying_s:.1f} times less"
            )


def _found(verification: Verification) -> str:
    return "found" if verification.exit_code == 1 else f"NOT FOUND: {verification.conclusion}"


async def count(num_answers: int, table: Table, folder: Path) -> None:
    started, num_seen = time.monotonic(), 0
    async for cases in collect(num_answers, folder):
        await asyncio.to_thread(table.add_all, cases)
        num_seen += len(cases)
        print(f"{time.monotonic() - started:.0f} s: {num_seen} of {num_answers} answers", flush=True)
        if not table.is_right or num_seen % _SHOWN_EVERY < len(cases):
            table.show()
            sys.stdout.flush()


def measured(num_answers: int) -> Table:
    table = Table()
    try:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(count(num_answers, table, Path(folder)))
    finally:
        table.close()
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=1000)
    table = measured(parser.parse_args().answers)
    table.show()
    return 0 if table.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
