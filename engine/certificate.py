"""Checks row invariance on the loaded model at start-up; exact mode requires it.

Each check computes one token sequence in some way and compares, bitwise, all keys and values and the logits of the last
positions with the plain way: the prompt in one forward, then one token per forward.
Not here: establishing row invariance (row_invariance, kernels).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.certificate_states import NUM_SLOTS, with_states
from outrider.engine.certificate_trace import History, Step, first_difference
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from outrider.kernels.kv_codes.layout import parts_of

# tokens; length of the prompt; crosses tiles of keys (16 to 64 positions) and blocks
_NUM_PROMPT_TOKENS = 70
_NUM_DECODED = 7


@dataclass(frozen=True)
class Check:
    """One way of computing the rows, and whether its bits equal the plain way's."""

    name: str
    holds: bool


@dataclass(frozen=True)
class Certificate:
    """The outcome of all checks.

    holds: exact mode may be offered. failing_operation: the first operation with different output bits.
    """

    holds: bool
    checks: tuple[Check, ...]
    failing_operation: str | None
    seconds: float

    def describe(self) -> str:
        """Describes the outcome in one sentence, for logs and errors."""
        if self.holds:
            return f"row invariance holds to the bit ({len(self.checks)} checks, {self.seconds:.1f} s)"
        failed = ", ".join(check.name for check in self.checks if not check.holds)
        return f"rows are not invariant ({failed}); the first operation that differs is {self.failing_operation}"


def certify(loaded: LoadedModel, runner: ModelRunner) -> Certificate:
    """Runs all checks on separate small caches with the runner's block size.

    Takes about 20 forwards of a few rows and 8 of up to 77 rows.
    """
    started = time.perf_counter()
    plan = _Plan(loaded, runner)
    plain = plan.plain()
    expected = _bits(plan, plain)
    checks: list[Check] = []
    failing: str | None = None
    for name, history in plan.others():
        found = _bits(plan, history)
        same = all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True)) and all(
            bool(torch.isfinite(tensor).all()) for tensor in found
        )
        checks.append(Check(name, same))
        if not same and failing is None:
            failing = first_difference(loaded, plan.new_cache(), plan.new_cache(), plain, history)
    holds = all(check.holds for check in checks)
    return Certificate(holds, tuple(checks), failing, time.perf_counter() - started)


class _Plan:
    """The token sequence, its blocks, and the other sequences of a batch."""

    def __init__(self, loaded: LoadedModel, runner: ModelRunner) -> None:
        self.loaded = loaded
        self.block_size = runner.cache.block_size
        self._graphs = runner.uses_graphs
        self.length = min(_NUM_PROMPT_TOKENS + _NUM_DECODED, loaded.max_model_len)
        self.num_prompt = max(1, self.length - _NUM_DECODED)
        generator = torch.Generator().manual_seed(2026)

        def draw(count: int) -> list[int]:
            drawn = torch.randint(loaded.vocab_size, (min(count, self.length),), generator=generator)
            return [int(token) for token in drawn]

        self.token_ids: list[int] = draw(self.length)
        # Room after the sequence for the siblings of tree rows.
        self._blocks_each = -(-(self.length + 2 * _NUM_DECODED) // self.block_size)
        order = torch.randperm(4 * self._blocks_each, generator=generator).tolist()
        self._blocks = [order[owner * self._blocks_each : (owner + 1) * self._blocks_each] for owner in range(4)]
        self._strangers = [draw(9), draw(4), draw(1)]

    def new_cache(self) -> ModelRunner:
        """Returns a runner on a zeroed cache."""
        cache = self.loaded.make_cache(4 * self._blocks_each, self.block_size)
        return ModelRunner(self.loaded, cache, self.loaded.make_states(NUM_SLOTS), graphs=self._graphs)

    def plain(self) -> History:
        singles = [self._chain(position, 1) for position in range(self.num_prompt, self.length)]
        return self._with_states((self._chain(0, self.num_prompt), *singles))

    def _with_states(self, history: History) -> History:
        return with_states(history, self.num_prompt) if self.loaded.recurrent_shapes else history

    def others(self) -> list[tuple[str, History]]:
        return [(name, self._with_states(history)) for name, history in self._others()]

    def _others(self) -> list[tuple[str, History]]:
        prompt, decoded = self.num_prompt, self.length - self.num_prompt
        chunk = prompt // 3 + 1
        chunks = [self._chain(start, min(chunk, prompt - start)) for start in range(0, prompt, chunk)]
        verify = self._chain(prompt, decoded)
        dirty = self._stranger_in(self._blocks[0])
        others = [
            ("one row against many", (self._chain(0, prompt), verify)),
            ("whole against chunked prefill", (*chunks, verify)),
            ("first place of a batch", (self._chain(0, prompt, place=0), self._chain(prompt, decoded, place=0))),
            ("last place of a batch", (self._chain(0, prompt, place=3), self._chain(prompt, decoded, place=3))),
            ("evicted and recomputed", (self._chain(0, prompt), dirty, self._chain(0, self.length))),
            ("chain against tree", (self._chain(0, prompt), self._tree(prompt))),
        ]
        if self.loaded.recurrent_shapes and decoded > 1:
            first = self._chain_with_wrong_draft(prompt, decoded // 2)
            rest = self._chain(prompt + decoded // 2, decoded - decoded // 2)
            others.append(("drafts of two rounds", (self._chain(0, prompt), first, rest)))
        return others

    def _chain(self, start: int, count: int, place: int | None = None) -> Step:
        """Returns the step of our tokens [start, start + count), alone or at a position among three other sequences."""
        tokens = self.token_ids[start : start + count]
        wanted = sum(start + row >= self.num_prompt for row in range(count))
        rows = SessionRows(tokens, start, self._blocks[0], wanted)
        positions = {start + row: row for row in range(count)}
        if place is None:
            return Step((rows,), 0, positions)
        company = [
            SessionRows(stranger, 0, self._blocks[1 + index], 1) for index, stranger in enumerate(self._strangers)
        ]
        return Step((*company[:place], rows, *company[place:]), place, positions)

    def _chain_with_wrong_draft(self, start: int, count: int) -> Step:
        """Returns the step of our tokens [start, start + count), and another one after them that is rejected."""
        step = self._chain(start, count + 1)
        tokens = [*self.token_ids[start : start + count], (self.token_ids[start + count] + 1) % self.loaded.vocab_size]
        rows = replace(step.sessions[0], token_ids=tokens)
        return Step((rows,), 0, {start + row: row for row in range(count)})

    def _stranger_in(self, block_ids: Sequence[int]) -> Step:
        """Returns the step in which another sequence overwrites our blocks."""
        return Step((SessionRows(self.token_ids[::-1], 0, block_ids, 0),), 0, {})

    def _tree(self, start: int) -> Step:
        """Returns the step of our tokens from `start` on as a path of a tree, each with a sibling off the path."""
        path = self.token_ids[start + 1 :]
        siblings = [(token + 1) % self.loaded.vocab_size for token in path]
        tree = [token for pair in zip(siblings, path, strict=True) for token in pair]
        parents = [2 * depth for depth in range(len(path)) for _ in range(2)]
        rows = SessionRows([self.token_ids[start], *tree], start, self._blocks[0], 1 + len(tree), 1, parents)
        return Step((rows,), 0, {start + depth: 2 * depth for depth in range(len(path) + 1)})


def _bits(plan: _Plan, history: History) -> list[torch.Tensor]:
    """Returns logits [decoded, V] and each layer's keys and values [length, Hkv, D] after a history."""
    runner = plan.new_cache()
    cache = runner.cache
    logits: dict[int, torch.Tensor] = {}
    slots: dict[int, int] = {}
    for step in history:
        batch = build_batch(step.sessions, cache.block_size)
        result = runner.forward(batch)
        logits_of_row = dict(zip(batch.logits_rows.tolist(), result.logits, strict=True))
        for position, row in step.flat_rows().items():
            slots[position] = int(batch.slot_mapping[row])
            if position >= plan.num_prompt:
                # A copy: the next replay of a CUDA graph overwrites it.
                logits[position] = logits_of_row[row].clone()
    blocks = torch.tensor([slots[position] // cache.block_size for position in range(plan.length)])
    offsets = torch.tensor([slots[position] % cache.block_size for position in range(plan.length)])
    stored = [part[blocks, :, offsets] for pair in cache.parts() for tensor in pair for part in parts_of(tensor)]
    return [torch.stack([logits[position] for position in range(plan.num_prompt, plan.length)]), *stored]
