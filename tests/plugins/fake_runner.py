"""vLLM's runner, as far as a proposer sees it, since vLLM is not installed with the tests.

Written after vllm/v1/worker/gpu_model_runner.py of 0.32.0: the rows of a batch move, a prompt is read in parts, a draft
is accepted up to its first wrong token, and what ends vLLM's engine (a draft that is too long, an id outside the
vocabulary, an exception) raises here. The target says a given text whatever is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

VOCAB_SIZE = 100
MAX_MODEL_LEN = 512


def vllm_config(addresses: Sequence[str], *, num_draft_tokens: int = 4, **options: Any) -> Any:
    """The part of vLLM's config that is read."""
    given = {"drafters": list(addresses), "method": "ngram", "deadline_ms": 10_000, "auto_off": False, **options}
    model = SimpleNamespace(
        get_vocab_size=lambda: VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        served_model_name="big",
        model="org/big",
        tokenizer="no/such-tokenizer",
        tokenizer_revision=None,
    )
    return SimpleNamespace(
        model_config=model,
        additional_config={"outrider": given},
        speculative_config=SimpleNamespace(num_speculative_tokens=num_draft_tokens),
    )


@dataclass(eq=False)
class Request:
    """prompt: tokens read at once; text: what the target says, the prompt included."""

    text: list[int]
    prompt_len: int
    output: list[int] = field(default_factory=list)
    is_read: bool = False
    draft: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.prompt_len + len(self.output) >= len(self.text)


def cycle(start: int, period: int = 7, length: int = 120) -> list[int]:
    """A text that repeats itself: n-grams find what follows."""
    return [start + place % period for place in range(length)]


class FakeRunner:
    def __init__(self, proposer: Any, num_draft_tokens: int = 4) -> None:
        self.proposer = proposer
        self.num_draft_tokens = num_draft_tokens
        self.num_drafted = self.num_accepted = self.num_steps = 0

    def step(self, batch: Sequence[Request]) -> None:
        """One step of these requests, in these rows; a new one only has its prompt read."""
        num_tokens = np.zeros(len(batch) + 1, np.int32)
        token_ids = np.zeros((len(batch) + 1, MAX_MODEL_LEN), np.int32)
        sampled = []
        for row, request in enumerate(batch):
            new = self._sample(request) if request.is_read else []
            request.is_read = True
            request.output += new
            sampled.append(new)
            known = request.text[: request.prompt_len + len(request.output)]
            num_tokens[row], token_ids[row, : len(known)] = len(known), known
        drafts = self.proposer.propose(sampled, num_tokens, token_ids, slot_mappings=None)
        assert len(drafts) == len(batch)
        for request, draft in zip(batch, drafts, strict=True):
            assert len(draft) <= self.num_draft_tokens, "vLLM's metrics: IndexError"
            assert all(0 <= entry < VOCAB_SIZE for entry in draft), "vLLM's embedding: IndexError"
            request.draft = draft
            self.num_drafted += len(draft)
        self.num_steps += 1

    def _sample(self, request: Request) -> list[int]:
        start = request.prompt_len + len(request.output)
        num_accepted = 0
        for token in request.draft:
            if start + num_accepted + 1 >= len(request.text) or token != request.text[start + num_accepted]:
                break
            num_accepted += 1
        self.num_accepted += num_accepted
        return request.text[start : start + num_accepted + 1]

    def finish(self, batch: list[Request]) -> None:
        """Until all have said their text; who has leaves, and the last row takes its place, as in vLLM."""
        batch = list(batch)
        while batch:
            self.step(batch)
            for row in reversed(range(len(batch))):
                if batch[row].is_done:
                    batch[row] = batch[-1]
                    batch.pop()
