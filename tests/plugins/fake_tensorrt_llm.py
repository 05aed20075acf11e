"""TensorRT-LLM's executor, as far as a drafter sees it, since TensorRT-LLM is not installed with the tests.

Written after tensorrt_llm/_torch/speculative/drafter.py and _torch/pyexecutor/py_executor.py of its repository: a
drafter is sent to the worker, asked before each forward pass, and its drafts are padded. What would end the executor (a
draft that is too long, an id outside the vocabulary, an exception) raises here.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

VOCAB_SIZE = 100


class Drafter:
    def __init__(
        self, max_draft_len: int | None = None, max_total_draft_tokens: int | None = None, max_concurrency: Any = None
    ) -> None:
        self.max_draft_len = max_draft_len
        self.max_total_draft_tokens = self._static_max_total_draft_tokens = max_total_draft_tokens
        self.max_concurrency = max_concurrency


class Ranks:
    """mpi_rank and mpi_broadcast; sent: what the first one has sent."""

    def __init__(self) -> None:
        self.rank = 0
        self.sent: Any = None

    def broadcast(self, value: Any, root: int = 0) -> Any:
        self.sent = value if self.rank == root else self.sent
        return self.sent


@contextmanager
def modules(ranks: Ranks) -> Iterator[None]:
    """As if TensorRT-LLM were installed."""
    made = {
        "tensorrt_llm._torch.speculative.drafter": {"Drafter": Drafter},
        "tensorrt_llm._utils": {"mpi_rank": lambda: ranks.rank, "mpi_broadcast": ranks.broadcast},
    }
    names = {".".join(name.split(".")[: end + 1]) for name in made for end in range(name.count(".") + 1)}
    for name in names:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(made.get(name, {}))
    try:
        yield
    finally:
        for name in (*names, "outrider.plugins.tensorrt_llm", "outrider.tensorrt_llm"):
            sys.modules.pop(name, None)


@dataclass(eq=False)
class Request:
    """text: what the target says, the prompt included."""

    py_request_id: int
    text: list[int]
    py_orig_prompt_len: int
    num_output: int = 0
    py_draft_tokens: list[int] = field(default_factory=list)

    @property
    def py_max_new_tokens(self) -> int:
        return len(self.text) - self.py_orig_prompt_len

    @property
    def is_done(self) -> bool:
        return self.num_output >= self.py_max_new_tokens

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return self.text[: self.py_orig_prompt_len + self.num_output]


class Executor:
    def __init__(self, drafter: Any) -> None:
        self.drafter = pickle.loads(pickle.dumps(drafter))
        self.num_steps = self.num_drafted = self.num_accepted = 0

    def step(self, batch: Sequence[Request]) -> None:
        """Each request has one token or more; its first comes with its prompt, and no draft."""
        decoding = [request for request in batch if request.num_output]
        for request in decoding:
            request.py_draft_tokens = [0] * self.drafter.max_draft_len
        self.drafter.prepare_draft_tokens(SimpleNamespace(generation_requests=decoding), None)
        for request in batch:
            draft = request.py_draft_tokens if request.num_output else []
            said = request.text[request.py_orig_prompt_len + request.num_output :]
            assert len(draft) <= min(self.drafter.max_total_draft_tokens, len(said) - 1), "its cache has no place"
            assert all(0 <= entry < VOCAB_SIZE for entry in draft), "its embedding"
            num_accepted = 0
            while num_accepted < len(draft) and draft[num_accepted] == said[num_accepted]:
                num_accepted += 1
            self.num_drafted, self.num_accepted = self.num_drafted + len(draft), self.num_accepted + num_accepted
            request.num_output += num_accepted + 1
        self.num_steps += 1

    def finish(self, batch: Sequence[Request]) -> None:
        while running := [request for request in batch if not request.is_done]:
            self.step(running)
