"""Finds the first operation that gives a row other bits, by comparing two ways of computing the same rows.

Not here: which ways are compared (certificate).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner


@dataclass(frozen=True)
class Step:
    """One forward of a history: its sessions, which of them is ours, and the rows of our positions."""

    sessions: tuple[SessionRows, ...]
    ours: int
    row_of_position: dict[int, int]  # absolute position -> row in our session

    def flat_rows(self) -> dict[int, int]:
        """Maps absolute position -> row in the flattened batch."""
        first = sum(len(rows.token_ids) for rows in self.sessions[: self.ours])
        return {position: first + row for position, row in self.row_of_position.items()}


History = tuple[Step, ...]


def first_difference(
    loaded: LoadedModel, first: ModelRunner, second: ModelRunner, plain: History, other: History
) -> str | None:
    """Returns the first operation, by position and then by order of execution, whose output bits differ.

    first, second: runners on zeroed caches. Rows depend on earlier positions only, so the first difference is a cause,
    not a consequence.
    """
    expected = _trace(loaded, first, plain)
    found = _trace(loaded, second, other)
    for position in sorted(expected.keys() & found.keys()):
        theirs = found[position]
        for name, row in expected[position].items():
            if name in theirs and not torch.equal(row, theirs[name]):
                return f"{name} at position {position}"
    return "the language model head"


Trace = dict[int, dict[str, torch.Tensor]]  # position -> operation -> its output row


def _trace(loaded: LoadedModel, runner: ModelRunner, history: History) -> Trace:
    trace: Trace = {}
    record: Callable[[str, Any], None] = lambda _name, _output: None  # noqa: E731  (rebound per step)

    def attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        record("the input of paged attention", query[None])
        attended = loaded.attention_ops.paged_attention(query, *args, **kwargs)
        record("paged attention", attended[None])
        return attended

    ops = replace(loaded.attention_ops, paged_attention=attention)
    traced = ModelRunner(replace(loaded, attention_ops=ops), runner.cache, runner.states)
    handles = []
    for name, module in loaded.model.named_modules():
        if name:
            handles.append(
                module.register_forward_pre_hook(
                    lambda _module, args, name=name: record(f"the input of {name}", args[0] if args else None)
                )
            )
            handles.append(module.register_forward_hook(lambda _module, _args, output, name=name: record(name, output)))
    try:
        for step in history:
            record = _recorder(trace, step)
            traced.forward(build_batch(step.sessions, runner.cache.block_size, loaded.device))
    finally:
        for handle in handles:
            handle.remove()
    return trace


def _recorder(trace: Trace, step: Step) -> Callable[[str, Any], None]:
    """Returns a function that files each row of an operation's output under its position.

    Repeated names (attention, once per layer) get a number.
    """
    rows = step.flat_rows()
    num_rows = sum(len(session.token_ids) for session in step.sessions)
    seen: dict[str, int] = {}

    def record(name: str, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(tensor, torch.Tensor) or tensor.ndim < 2 or not tensor.is_floating_point():
            return
        if tensor.ndim > 2:  # [1, T, ...]; experts and routers work on [T, ...]
            tensor = tensor[0]
        if tensor.shape[0] != num_rows:
            return
        seen[name] = seen.get(name, -1) + 1
        key = name if seen[name] == 0 else f"{name} (call {seen[name] + 1})"
        for position, row in rows.items():
            trace.setdefault(position, {})[key] = tensor[row].flatten().clone()

    return record
