"""Draft chains on the CPU: all tokens of all sessions' drafts in one recorded program, without Python between them.

  committed rows -> forward -> [token -> forward of one row per session] ... -> token

The counterpart of sampling/device_chains. A program is recorded for a number of sessions and of committed rows, both
padded to few sizes (`key_of`), for at least LEAST_TOKENS tokens; a shorter chain ends before the program does. A
recording computes what the same calls compute one by one, and is compared with them before its first use.

Not here: whose chains they are (drafting/methods), the kernels (kernels/cpu/program, row_laws/cpu_draws).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from outrider.engine.attention.batch import ForwardBatch, SessionRows
from outrider.engine.run.cpu_graphs import ROW_BUCKETS, most_rows_per_session, most_threads
from outrider.engine.run.runner import ModelRunner
from outrider.engine.sampling.chain_inputs import Calls, DrawCalls, Inputs
from outrider.engine.sampling.chains import ChainStart, DrawnToken
from outrider.shared.messages import LAW_TOTAL

log = logging.getLogger(__name__)

# tokens; least length of a recorded program: each token takes about 10 ms to record, and most chains are as short
LEAST_TOKENS = 3
# bytes of address space; bounds the programs' memory; only what the widest program uses is committed
_ARENA_BYTES = 1 << 27


class ChainPass(Protocol):
    """The forwards of a chain. Contract: as for chains.ChainForward, on the CPU."""

    def first(self, batch: ForwardBatch, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the committed rows, with their input given [R, W] -> logits [S, V] of batch.logits_rows, and the
        input of the next step [S, H]."""
        ...

    def step(self, batch: ForwardBatch, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes one row per session, with the same results as `first`."""
        ...


class RecordedDraws:
    """Draws the tokens of one kind of program, recorded for each size. Not for use from two threads at a time.

    A size is a key; its inputs are buffers with `calls`, `draws`, `num_tokens` and `clear`, and the calls have `draws`.
    """

    def __init__(self, num_threads: int, target_ids: torch.Tensor | None) -> None:
        """num_threads: most that a recorded program uses. target_ids: int64, the token ids of the logits; None: the
        logits' own."""
        from outrider.kernels.cpu.program.arena import Arena  # numba imports slowly

        self._num_threads = num_threads
        self._target_ids = None if target_ids is None else target_ids.contiguous()
        self._arena = Arena(_ARENA_BYTES)
        self._runs: dict[Any, list[Callable[[], None]]] = {}
        self._too_large: set[Any] = set()
        self._is_refused = False

    def _compute(self, calls: Any, num_tokens: int, cut: Callable[[], None] = lambda: None) -> None:
        """Runs the calls of a program that draws this many tokens; calls `cut` where a shorter one ends."""
        raise NotImplementedError

    def _draw(self, logits: torch.Tensor, draws: DrawCalls, depth: int) -> torch.Tensor:
        """Draws the sessions' next tokens from logits [S, V]; returns them, int64 [S]."""
        from outrider.kernels.row_laws.cpu_draws import draw

        drawn = draws.drawn[depth]
        draw(logits.float(), draws.tables[depth], drawn, target_ids=self._target_ids, law_total=LAW_TOTAL)
        return drawn.next_ids

    def _run(
        self, key: Any, inputs: Any, num_tokens: int, fill: Callable[[], None], without_padding: Callable[[], Any]
    ) -> None:
        """Draws what `fill` puts into the inputs. without_padding: returns their calls that check their batch."""
        runs = self._runs.get(key)
        if runs is None and not self._is_refused and key not in self._too_large:
            runs = self._record(key, inputs)
        fill()
        if runs is not None and key not in self._runs:
            self._compare(key, runs, inputs, without_padding(), num_tokens)
        elif runs is not None:
            runs[num_tokens - 1]()
        else:
            self._compute(without_padding(), num_tokens)

    def _record(self, key: Any, inputs: Any) -> list[Callable[[], None]] | None:
        """Records the programs that run chains of 1, 2, ... tokens; None if they cannot be recorded."""
        from outrider.kernels.cpu.program.arena import ArenaFull
        from outrider.kernels.cpu.program.recorder import Recorder
        from outrider.kernels.cpu.team import recording

        inputs.clear()
        recorder = Recorder(self._arena, self._num_threads)
        try:
            with recording(recorder), recorder:
                self._compute(inputs.calls, inputs.num_tokens, recorder.cut)
        except ArenaFull:
            self._too_large.add(key)
            return None
        except Exception as error:  # chains that cannot be recorded still run
            self._refuse(f"{type(error).__name__}: {error}")
            return None
        return recorder.recorded_to_cuts()

    def _compare(
        self, key: Any, runs: list[Callable[[], None]], inputs: Any, without_padding: Any, num_tokens: int
    ) -> None:
        """Keeps the recording if it draws what its calls draw one by one; these draw the current chains."""
        num_sessions = len(without_padding.draws.drawn[0].token_ids)
        runs[num_tokens - 1]()
        found = inputs.draws.results(num_tokens, num_sessions)
        self._compute(without_padding, num_tokens)
        if all(map(torch.equal, found, inputs.draws.results(num_tokens, num_sessions))):
            self._runs[key] = runs
        else:
            self._refuse("a recording did not repeat the draws of its calls")

    def _refuse(self, reason: str) -> None:
        self._is_refused = True
        self._runs.clear()
        log.info("draft chains are not recorded: %s", reason)


class CpuChains(RecordedDraws):
    """Draws chains of one pass over one cache."""

    def __init__(
        self,
        chain_pass: ChainPass,
        *,
        given_like: torch.Tensor,
        target_ids: torch.Tensor | None,
        block_size: int,
        table_width: int,
        most_rows_per_session: int,
        num_threads: int,
    ) -> None:
        """Takes the forwards.

        given_like: one row of the first forward's input. table_width: largest number of blocks of a session.
        most_rows_per_session: as in cpu_graphs. target_ids, num_threads: as in RecordedDraws.
        """
        super().__init__(num_threads, target_ids)
        self._pass = chain_pass
        self._given_like = given_like
        self._block_size, self._table_width = block_size, table_width
        self._most_rows_per_session = most_rows_per_session
        self._sizes: dict[tuple[int, int], Inputs] = {}

    def taken(self, rows: Sequence[SessionRows]) -> list[int]:
        """Returns the indices of the sessions that `draw` takes: those with few rows, unless too many."""
        places = [
            place
            for place, part in enumerate(rows)
            if len(part.token_ids) <= self._most_rows_per_session and len(part.block_ids) <= self._table_width
        ]
        return places if places and key_of([len(rows[place].token_ids) for place in places]) is not None else []

    @torch.inference_mode()
    def draw(
        self, rows: Sequence[SessionRows], given: Sequence[torch.Tensor], starts: Sequence[ChainStart]
    ) -> list[list[DrawnToken]]:
        """Draws one chain per session, from its committed rows and their inputs.

        A chain ends before a row without a finite logit. Writes the keys and values of all tokens but the last. Raises
        ValueError if `taken` would not take all rows.
        """
        lens = [len(part.token_ids) for part in rows]
        key = key_of(lens)
        if key is None:
            raise ValueError(f"{lens} rows are too many for a chain")
        num_tokens = max(start.draws.num_tokens for start in starts)
        inputs = self._sizes.get(key)
        if inputs is None or inputs.num_tokens < num_tokens:
            inputs = Inputs(*key, max(num_tokens, LEAST_TOKENS), self._table_width, self._given_like)
            self._sizes[key] = inputs
            self._runs.pop(key, None)

        self._run(
            key,
            inputs,
            num_tokens,
            functools.partial(inputs.fill, rows, given, starts, self._block_size),
            functools.partial(inputs.without_padding, sum(lens), len(rows)),
        )
        return inputs.draws.chains([start.draws.num_tokens for start in starts])

    def _compute(self, calls: Calls, num_tokens: int, cut: Callable[[], None] = lambda: None) -> None:
        logits, carried = self._pass.first(calls.first, calls.given)
        for depth in range(num_tokens):
            if depth > 0:
                cut()
                logits, carried = self._pass.step(calls.steps[depth - 1], carried)
            self._draw(logits, calls.draws, depth)


class ModelPass:
    """The ChainPass of a language model; its state is in the cache, nothing else is given or carried."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def first(self, batch: ForwardBatch, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._runner.logits(batch), given

    def step(self, batch: ForwardBatch, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._runner.logits(batch), carried


def key_of(lens: Sequence[int]) -> tuple[int, int] | None:
    """Returns the padded numbers of committed rows and sessions; None if there are too many.

    Few sizes: a recording takes as long as 10 forwards of a small model, one row more a fraction of one.
    """
    num_sessions = _padded(len(lens))
    num_rows = min(num_sessions * _padded(-(-sum(lens) // num_sessions)), ROW_BUCKETS[-1])
    return (num_rows, num_sessions) if max(sum(lens), num_sessions) <= num_rows else None


def _padded(count: int) -> int:
    """Returns the smallest of 1, 2, 3, 4, 6, 8, 12, 16, ... that is at least `count`."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power > 2 and count <= power * 3 // 4 else power


def model_chains(runner: ModelRunner) -> CpuChains:
    """Returns the chains of a language model whose forwards are recorded, without recurrent layers."""
    loaded, cache = runner.loaded, runner.cache
    return CpuChains(
        ModelPass(runner),
        given_like=torch.zeros(0),
        target_ids=None,
        block_size=cache.block_size,
        table_width=min(cache.num_blocks, -(-loaded.max_model_len // cache.block_size)),
        most_rows_per_session=most_rows_per_session(loaded.layer_shapes),
        num_threads=most_threads(loaded.model),
    )
