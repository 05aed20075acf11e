"""One forward of one session by our engine and by transformers, prepared so that it can be repeated."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.model.load import load_model
from outrider.engine.recurrent.rows import StateRows
from outrider.engine.run.runner import ModelRunner

BLOCK_SIZE = 16
# rows of the log that a verification replays: the last committed token and two accepted draft tokens
NUM_REPLAYED = 3
# one call, from what was prepared by another, both untimed but for the call: returns the logits of its last row
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Step:
    """num_rows new rows after context_len others."""

    name: str
    num_rows: int
    context_len: int


def _token_ids(step: Step) -> list[int]:
    return [5 + position * 31 % 1000 for position in range(step.context_len + step.num_rows)]


class Ours:
    """Slot 0 of the states holds the context, slot 1 is written by every timed call."""

    def __init__(self, path: str, dtype: str) -> None:
        self._loaded = load_model(path, dtype=dtype)

    def prepare(self, step: Step) -> Callable[[], Call]:
        token_ids = _token_ids(step)
        blocks = list(range(-(-len(token_ids) // BLOCK_SIZE)))
        runner = ModelRunner(
            self._loaded, self._loaded.make_cache(len(blocks), BLOCK_SIZE), self._loaded.make_states(2), graphs=True
        )
        num_replayed = NUM_REPLAYED if step.num_rows > 1 else 1
        state = StateRows(None, (), 1, step.num_rows)
        if step.context_len:
            num_chain = step.context_len - num_replayed + 1
            context = StateRows(None, (), 0, num_chain)
            rows = SessionRows(token_ids[: step.context_len], 0, blocks, 0, state=context)
            runner.forward(build_batch([rows], BLOCK_SIZE))
            state = StateRows(0, range(num_replayed), 1, num_committed=1)
        num_logits = step.num_rows if step.context_len else 1
        rows = SessionRows(token_ids[step.context_len :], step.context_len, blocks, num_logits, state=state)
        return lambda: lambda: runner.forward(build_batch([rows], BLOCK_SIZE)).logits[-1]


class Theirs:
    def __init__(self, path: str, dtype: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    def prepare(self, step: Step) -> Callable[[], Call]:
        token_ids = torch.tensor([_token_ids(step)])
        positions = torch.arange(token_ids.shape[1])[None]
        cache: Any = None
        if step.context_len:
            with torch.inference_mode():
                cache = self._model(token_ids[:, : step.context_len], use_cache=True).past_key_values
        num_logits = step.num_rows if step.context_len else 1

        @torch.inference_mode()
        def forward(cached: Any) -> torch.Tensor:
            output = self._model(
                token_ids[:, step.context_len :],
                position_ids=positions[:, step.context_len :],
                past_key_values=cached,
                use_cache=True,
                logits_to_keep=num_logits,
            )
            logits: torch.Tensor = output.logits[0, -1]
            return logits

        def prepared() -> Call:
            # A call advances the recurrent states in place, and they cannot be cut back.
            cached = copy.deepcopy(cache)
            return lambda: forward(cached)

        return prepared
