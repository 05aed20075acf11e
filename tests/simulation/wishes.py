"""What simulated clients ask for, and what they must be answered: the undisturbed law (toy.undisturbed)."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.shared.sampling_params import Grammar, GrammarKind, SamplingParams, stream_key
from tests.simulation.toy import GRAMMARS, MODEL, TOKENIZER, text_of, undisturbed

# "pattern": a completion under a regular expression; "call": a chat that must call a tool, whose text is read for the
# call while it comes, and is cut anywhere by commits
SHAPES = ("completion", "pattern", "call")
PATTERN = "(ab|cd|é| ){3,12}[.!]"
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"arg": {"type": "string", "enum": ["ab", "cd.", "é", "ba!"]}},
            "required": ["arg"],
            "additionalProperties": False,
        },
    },
}
# outputs; of one request: some give way when another client comes
_MANY = 12
# tokens; longest call, spelled letter by letter
_CALL_TOKENS = 70
_ARGUMENTS = re.compile(r'"arguments":\s*(\{"arg": "[^"]*"\})?')


@dataclass(frozen=True, eq=False)
class Wish:
    """A request. shape: of SHAPES. kind: "greedy", "seeded", or "sampled" (no seed: its tokens are drawn afresh)."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    kind: str
    seed: int
    n: int
    stop: tuple[str, ...]
    speculation: dict[str, Any]
    shape: str = "completion"

    @classmethod
    def drawn(
        cls, rng: random.Random, request_id: str, methods: tuple[str, ...], shapes: tuple[str, ...] = SHAPES
    ) -> Wish:
        """methods: that some drafter or verifier serves. No prompt ends within a character (token 12): the answer would
        begin with the rest of it.
        """
        method = rng.choice(["auto", "off", *methods, *methods])
        speculation: dict[str, Any] = {"method": method}
        if method != "off":
            speculation["num_speculative_tokens"] = rng.randint(1, 5)
        wish = cls(
            request_id,
            prompt=(*rng.choices(range(1, 16), k=rng.randint(0, 8)), rng.randint(1, 11)),
            max_tokens=rng.randint(1, 24),
            kind=rng.choice(["greedy", "seeded", "sampled"]),
            seed=rng.randrange(1000),
            n=rng.choice([1, 1, 1, 2]),
            stop=rng.choice([(), (), ("ab",), ("d.", "é")]),
            speculation=speculation,
        )
        return wish if len(shapes) == 1 else wish._shaped(rng, shapes)

    def _shaped(self, rng: random.Random, shapes: tuple[str, ...]) -> Wish:
        shape = rng.choice(shapes)
        n = _MANY if rng.random() < 0.1 else self.n
        if shape != "call":
            return dataclasses.replace(self, shape=shape, n=n)
        max_tokens = _CALL_TOKENS if rng.random() < 0.8 else self.max_tokens
        return dataclasses.replace(self, shape=shape, n=n, max_tokens=max_tokens, stop=())

    @property
    def answer_id(self) -> str:
        return f"{'chatcmpl' if self.shape == 'call' else 'cmpl'}-{self.request_id}"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.shape == "call" else "/v1/completions"

    @property
    def params(self) -> SamplingParams:
        if self.kind == "greedy":
            return SamplingParams(temperature=0.0, max_tokens=self.max_tokens)
        return SamplingParams(max_tokens=self.max_tokens, seed=self.seed if self.kind == "seeded" else None)

    def body(self) -> dict[str, Any]:
        body = {
            "model": MODEL,
            "max_tokens": self.max_tokens,
            "temperature": self.params.temperature,
            "n": self.n,
            "stop": list(self.stop),
            "stream": True,
            "request_id": self.request_id,
            "speculation": self.speculation,
            **({"seed": self.seed} if self.kind == "seeded" else {}),
        }
        if self.shape == "call":
            message = {"role": "user", "content": TOKENIZER.decode(self.prompt)}
            return {
                **body,
                "messages": [message],
                "tools": [_TOOL],
                "tool_choice": "required",
                "parallel_tool_calls": False,
            }
        body["prompt"] = list(self.prompt)
        return body if self.shape == "completion" else {**body, "structured_outputs": {"regex": PATTERN}}

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a few wishes per simulation
    def expected(self, choice: int, call: Grammar | None) -> tuple[int, ...] | None:
        """Returns the output; None: it is drawn afresh each time. call: the grammar that the gateway made of tools."""
        if self.kind == "sampled":
            return None
        grammar = Grammar(GrammarKind.REGEX, PATTERN) if self.shape == "pattern" else call
        prompt = self._prompt_token_ids()
        key = stream_key(self.seed if self.kind == "seeded" else 0, prompt, choice)
        state = None if grammar is None else GRAMMARS.compile(grammar)
        return tuple(undisturbed(prompt, self.params, key, state))

    def _prompt_token_ids(self) -> Sequence[int]:
        if self.shape != "call":
            return self.prompt
        body = self.body()
        text = TOKENIZER.apply_chat_template(body["messages"], tools=body["tools"])
        return TOKENIZER.encode(text, add_special_tokens=False)

    def shown(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """Returns what a client reads of an output, of a call the name and the arguments, and whether it must be all of
        that: of a call that has no end yet less may be shown.
        """
        text = text_of(token_ids, self.stop)
        if self.shape != "call":
            return text, True
        found = _ARGUMENTS.search(text)
        if found is None:
            return "f", False
        return ("f" + found[1], True) if found[1] else ("f" + text[found.end() :], False)

    def pieces(self, choice: dict[str, Any]) -> str:
        """Returns what an event of this choice adds to what its client has read."""
        if self.shape != "call":
            text: str = choice["text"]
            return text
        delta = choice["delta"]
        functions = [call.get("function", {}) for call in delta.get("tool_calls") or []]
        parts = [part for function in functions for part in (function.get("name"), function.get("arguments"))]
        return (delta.get("content") or "") + "".join(part or "" for part in parts)
