"""One run of the audit: what every test needs to ask the server and to record what it found."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .answers import Answer, Law, ServerError
from .verdicts import Finding, Replay, Verdict
from .wire import CHAT, COMPLETIONS, Server

PROMPTS = (
    "def read_config(path):\n    ",
    "import json\nimport os\n\n\nclass Cache:\n    def __init__(self, ",
    "# The list of the numbers from one to twenty\none, two, three, ",
    "Once upon a time there was a small village by the sea, and in it ",
    "The three most important rules of writing clear documentation are:\n1. ",
    "for name, value in sorted(items.items()):\n    if value ",
    "Question: What is the capital of France?\nAnswer: The capital of France is ",
    "async def main() -> None:\n    async with session.get(url) as response:\n        ",
)
# requests at once
CROWD_WIDTH = 16
# places of an answer whose laws are asked for one by one, where the server has no prompt_logprobs
FORCED_PLACES = 12
# replays kept per test
_MAX_REPLAYS = 3

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Options:
    model: str = ""
    tokens: int = 12_000  # drawn in the tests of the law
    seed: int = 1
    body: Mapping[str, Any] = field(default_factory=dict)  # added to every request
    reference_body: Mapping[str, Any] | None = None  # the same server without drafts
    only: frozenset[str] = frozenset()
    skip: frozenset[str] = frozenset()  # fields never sent
    greedy_tokens: int = 48
    width: int = 8


@dataclass(frozen=True)
class Abilities:
    """What the server can do, found out before any test."""

    list_size: int = 0  # logprobs per position
    names_ids: bool = False  # return_tokens_as_token_ids, or ids in the lists
    gives_ids: bool = False  # return_token_ids
    tokenize_field: str = ""
    takes_ids: bool = False  # prompts of token ids
    prompt_logprobs: bool = False
    lists: str = "none"  # raw | after temperature | unclear | none
    hidden_seed: bool = False  # equal answers at T = 1 without a seed
    drafts_seen: str = ""  # where: /metrics, an answer's timings, chunks of several tokens
    accepted: frozenset[str] = frozenset()
    neutral: Mapping[str, Any] = field(default_factory=dict)  # defaults switched off in every request
    refused: Mapping[str, str] = field(default_factory=dict)


class Session:
    """Asks the server, and collects findings. `abilities` and `prompts` are set before the first test."""

    def __init__(self, server: Server, options: Options, reference: Server | None = None) -> None:
        self.server, self.options, self.reference = server, options, reference
        self.model = options.model
        self.abilities = Abilities()
        self.prompts: list[Prompt] = list(PROMPTS)
        self.findings: list[Finding] = []
        self.replays: list[Replay] = []
        self.random = random.Random(options.seed)
        self.figure_noise: list[float] = []  # |difference| in nats of the server's figures for one law
        self.greedy_answers: list[Answer] = []
        self._next_seed = options.seed * 1_000_003

    @property
    def has_reference(self) -> bool:
        return self.reference is not None or self.options.reference_body is not None

    # ---- requests
    @property
    def ids_asked(self) -> dict[str, Any]:
        """Fields that make an answer name its token ids, where only the lists do."""
        abilities = self.abilities
        return {"logprobs": abilities.list_size} if abilities.names_ids and not abilities.gives_ids else {}

    def body(self, prompt: Prompt, **fields: Any) -> dict[str, Any]:
        """A request whose defaults are neutral. None leaves a field out."""
        body = {"model": self.model, "prompt": prompt, **self.abilities.neutral, **fields}
        if self.abilities.gives_ids:
            body["return_token_ids"] = True
        if body.get("logprobs") and self.abilities.names_ids:
            body["return_tokens_as_token_ids"] = True
        if self.abilities.hidden_seed and body.get("temperature") and "seed" not in body:
            self._next_seed += 1
            body["seed"] = self._next_seed
        return {key: value for key, value in {**body, **self.options.body}.items() if value is not None}

    def ask(self, prompt: Prompt, **fields: Any) -> Answer:
        return self.identified(self.server.ask(COMPLETIONS, self.body(prompt, **fields))[0])

    def ask_reference(self, prompt: Prompt, **fields: Any) -> Answer:
        server = self.reference or self.server
        body = {**self.body(prompt, **fields), **(self.options.reference_body or {})}
        return self.identified(server.ask(COMPLETIONS, body)[0])

    def ask_all(self, bodies: Sequence[Mapping[str, Any]], width: int) -> list[list[Answer]]:
        """The choices of each request. Raises the first ServerError."""
        outcomes = self.server.ask_all(COMPLETIONS, bodies, width)
        for outcome in outcomes:
            if isinstance(outcome, ServerError):
                raise outcome
        return [[self.identified(a) for a in outcome] for outcome in outcomes if not isinstance(outcome, ServerError)]

    @staticmethod
    def identified(answer: Answer) -> Answer:
        """Returns the answer with its token ids, if only the lists name them."""
        keys = [token.key for token in answer.tokens]
        if answer.ids or not keys or not all(key.startswith("token_id:") for key in keys):
            return answer
        return Answer(**{**vars(answer), "ids": tuple(int(key[9:]) for key in keys)})

    # ---- forced laws
    @property
    def can_force(self) -> bool:
        """Laws of the target itself, behind given tokens: the first token after a prompt is never speculated."""
        abilities = self.abilities
        named = abilities.prompt_logprobs or abilities.names_ids
        return (
            abilities.takes_ids and abilities.list_size > 1 and named and (abilities.gives_ids or abilities.names_ids)
        )

    def places(self, length: int) -> list[int] | None:
        """The places to force, chosen before the answer is seen; None: all of them, in one request."""
        if self.abilities.prompt_logprobs:
            return None
        return sorted(self.random.sample(range(length), min(FORCED_PLACES, length)))

    def forced_laws(self, prompt: Prompt, ids: Sequence[int], places: Sequence[int] | None) -> dict[int, Law]:
        if isinstance(prompt, str) or not ids:
            return {}
        size = self.abilities.list_size
        if places is None:
            return self._prompt_laws(prompt, ids)
        within = [place for place in places if place < len(ids)]
        bodies = [self.body([*prompt, *ids[:place]], max_tokens=1, temperature=1.0, logprobs=size) for place in within]
        answers = self.ask_all(bodies, 4)
        return {p: a[0].tokens[0].law for p, a in zip(within, answers, strict=True) if a[0].tokens}

    def _prompt_laws(self, prompt: Sequence[int], ids: Sequence[int]) -> dict[int, Law]:
        size = self.abilities.list_size
        answer = self.ask([*prompt, *ids], max_tokens=1, temperature=0, prompt_logprobs=size)
        if answer.prompt_laws is None or len(answer.prompt_laws) != len(prompt) + len(ids):
            raise ServerError(0, "prompt_logprobs are not one for each token of the prompt", answer.request)
        return {place: law for place, law in enumerate(answer.prompt_laws[len(prompt) :]) if law}

    # ---- findings
    def record(self, test: str, verdict: Verdict, evidence: str, sensitivity: str = "", **figures: Any) -> None:
        replays = tuple(i for i, replay in enumerate(self.replays) if replay.test == test)
        self.findings.append(Finding(test, verdict, evidence, sensitivity, figures, replays))

    def keep(self, test: str, expected: str, *answers: Answer, path: str = COMPLETIONS, at_once: bool = False) -> None:
        """Keeps the requests of a failure for the replay file."""
        if sum(replay.test == test for replay in self.replays) < _MAX_REPLAYS:
            requests, texts = tuple(a.request for a in answers), tuple(a.shown for a in answers)
            self.replays.append(Replay(test, expected, requests, texts, path, at_once))

    def record_server_error(self, test: str, error: ServerError) -> None:
        """5xx and a lost connection are failures with that request as their replay; a refusal is not tested."""
        if error.is_failure:
            path = CHAT if "messages" in error.request else COMPLETIONS
            self.replays.append(Replay(test, "an answer", (error.request,), ("",), path))
        self.record(test, Verdict.FAIL if error.is_failure else Verdict.NOT_TESTED, f"server error {error}")
