"""Records a CPU forward so that it can be replayed on other data of the same shapes.

Our kernels report their calls (`team.run`); torch operations arrive through the dispatcher:
* views are free in the replay;
* lookups, sums, joins and conversions to fp32 are replaced by kernels (`elementwise`);
* any other operation is replayed through Python, its result copied to where the first one lay;
* operations whose shape or value depends on data (`item`, `nonzero`) raise NotRecordable.
Values that Python reads past the dispatcher (`tolist`, `numpy`) are not seen: engine/run/cpu_graphs compares results
before it uses a recording.

Intermediate tensors lie in an arena at fixed addresses. Freed memory is reused late: a late thread may still use it,
and a step that writes there would wait.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.kernels.cpu.program.arena import Arena
from outrider.kernels.cpu.program.program import Program, Step, step_of
from outrider.kernels.cpu.team import Work
from outrider.kernels.elementwise import cpu as elementwise

_aten = torch.ops.aten
# tensors, one or two layers' intermediates; allocated before freed memory is reused. 64 leave the cache (log: 5ac2e36)
_NUM_HELD = 16
_EMPTY = {_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default, _aten.empty_strided.default}


class NotRecordable(Exception):
    """Raised if the recording would be wrong for other data."""


@dataclasses.dataclass(frozen=True)
class _Repeated:
    """A torch operation replayed through Python."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor, ...]  # where its results go; empty if it writes into its arguments

    def run(self) -> None:
        results = self.function(*self.args, **self.kwargs)
        for output, result in zip(self.outputs, _tensors(results), strict=bool(self.outputs)):
            output.copy_(result)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a forward: enter it around the forward, within `cpu_team.recording(self)`."""

    def __init__(self, arena: Arena, num_threads: int) -> None:
        """num_threads: upper bound for the recorded program."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self._num_threads = num_threads
        self._steps: list[Step | _Repeated] = []
        self._cuts: list[int] = []  # numbers of steps
        self._kept: list[Any] = []
        self._held: deque[torch.Tensor] = deque(maxlen=_NUM_HELD)

    def work(self, work: Work) -> None:
        self._steps.append(step_of(work))

    def scratch(self, bytes_per_thread: int, num_threads: int) -> int:
        # The call runs alone while recording and as part of the program later.
        return self._arena.scratch(bytes_per_thread, max(num_threads, self._num_threads))

    def cut(self) -> None:
        """The recorded function can end here."""
        self._cuts.append(len(self._steps))

    def recorded(self) -> Callable[[], None]:
        """All steps in order, as one function."""
        return self.recorded_to_cuts()[-1]

    def recorded_to_cuts(self) -> list[Callable[[], None]]:
        """All steps in order up to each cut, and all of them."""
        ends = [*self._cuts, len(self._steps)]
        parts: list[tuple[Program | _Repeated, int, list[int]]] = []  # the part, its first step, its cuts
        first = 0
        for kind, group in itertools.groupby(self._steps, key=type):
            steps: list[Any] = list(group)
            last = first + len(steps)
            if kind is _Repeated:
                parts += [(step, first + index, [first + index + 1]) for index, step in enumerate(steps)]
            else:
                cuts = [end for end in dict.fromkeys(ends) if first < end <= last]
                program = Program(steps, self._num_threads, [end - first for end in cuts])
                parts.append((program, first, cuts))
            first = last
        kept = tuple(self._kept)
        self._held.clear()
        return [_running(parts, end, kept) for end in ends]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        ours = self._with_kernel(func, args, kwargs)
        if ours is not None:
            return ours
        if _depends_on_data(func, args):
            raise NotRecordable(f"{func} depends on data")
        result = func(*args, **kwargs)
        if func._schema.is_mutable and func is not _aten.detach_.default:
            self._repeat(func, args, kwargs, ())
            return result
        inputs = {_storage_of(tensor) for tensor in _tensors((args, tuple(kwargs.values())))}
        if func not in _EMPTY and all(_storage_of(tensor) in inputs for tensor in _tensors(result)):
            if not isinstance(result, (torch.Tensor, list, tuple)):
                raise NotRecordable(f"{func} gives {type(result).__name__}")
            self._kept.extend(tensor for tensor in _tensors(result) if not self._arena.holds(tensor))
            return result
        return self._placed(func, args, kwargs, result)

    def _repeat(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[torch.Tensor, ...]
    ) -> None:
        # Borrowed: at the replay, the same tensors lie at these addresses.
        borrow = self._borrow
        borrowed_kwargs = {name: borrow(value) for name, value in kwargs.items()}
        self._steps.append(_Repeated(func, borrow(args), borrowed_kwargs, borrow(outputs)))

    def _borrow(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._arena.borrowed(value)
        if isinstance(value, (tuple, list)):
            return type(value)(self._borrow(part) for part in value)
        return value

    def _placed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """The result of an operation, copied into the arena."""
        outputs = tuple(self._like(tensor) for tensor in _tensors(result))
        if func not in _EMPTY:
            for output, tensor in zip(outputs, _tensors(result), strict=True):
                output.copy_(tensor)
            self._repeat(func, args, kwargs, outputs)
        return outputs[0] if isinstance(result, torch.Tensor) else type(result)(outputs)

    def _with_kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The result by one of our kernels, which records itself; None if no kernel takes the operation."""
        if func is _aten.add.Tensor and not kwargs and isinstance(args[1], torch.Tensor):
            left, right = args
            if elementwise.takes_sum(left, right):
                out = self._like(left)
                elementwise.add(left, right, out)
                return out
        elif func is _aten.cat.default and len(args[0]) == 2 and _joins_rows(*args):
            left, right = args[0]
            if elementwise.takes_join(left, right):
                out = self._empty((*left.shape[:-1], left.shape[-1] + right.shape[-1]), left.dtype)
                elementwise.join(left, right, out)
                return out
        elif _widens(func, args, kwargs):
            if elementwise.takes_widening(args[0]):
                out = self._empty(args[0].shape, torch.float32)
                elementwise.widen(args[0], out)
                return out
        else:
            lookup = _lookup(func, args, kwargs)
            if lookup is not None and elementwise.takes_rows(*lookup[:2]):
                table, indices, shape = lookup
                out = self._empty(shape, table.dtype)
                elementwise.gather(table, indices, out)
                return out
        return None

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._tensor(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * size)
        return self._tensor(tuple(shape), tuple(reversed(strides)), dtype)

    def _tensor(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = self._arena.tensor(shape, strides, dtype)
        self._held.append(tensor)
        return tensor


def _running(parts: Sequence[tuple[Program | _Repeated, int, list[int]]], end: int, kept: Any) -> Callable[[], None]:
    """Runs the parts up to step `end`. kept: what must outlive it."""
    runs: list[Callable[[], None]] = []
    for part, first, cuts in parts:
        if first < end and isinstance(part, Program) and end in cuts:
            runs.append(functools.partial(part.run, cuts.index(end)))
        elif first < end:
            runs.append(part.run)

    def run(_kept: Any = kept) -> None:
        for each in runs:
            each()

    return run


def _depends_on_data(func: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether the shape of the result, or a value that Python sees, depends on the tensors' content."""
    if func is _aten.index.Tensor:  # tagged only because of its masks
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _joins_rows(parts: Sequence[torch.Tensor], dim: int = 0) -> bool:
    return dim in (-1, parts[0].dim() - 1)


def _widens(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether the operation converts its tensor to fp32."""
    if func is _aten.to.dtype:
        return args[1:] == (torch.float32,) and not kwargs
    return func is _aten._to_copy.default and kwargs == {"dtype": torch.float32}


def _lookup(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]] | None:
    """(table [N, ...], row indices, shape of the result) if the operation gathers whole rows; else None."""
    if func is _aten.embedding.default:
        table, indices = args[:2]
        return table, indices, (*indices.shape, *table.shape[1:])
    if func is _aten.index_select.default and args[1] == 0:
        table, _, indices = args
        return table, indices, (*indices.shape, *table.shape[1:])
    if func is _aten.index.Tensor:
        table, parts = args
        if table.dim() > 1 and table.shape[0] == 1 and len(parts) == 2 and parts[0] is None and parts[1].dim() == 1:
            return table[0], parts[1], (1, *parts[1].shape, *table.shape[2:])
    return None


def _storage_of(tensor: torch.Tensor) -> int:
    """Address of its storage; 0 for packed weights, which are opaque."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and not tensor.is_mkldnn else 0


def _tensors(values: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples and lists."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (tuple, list)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []
