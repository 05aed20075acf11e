"""Running one compiled function on several threads, and keeping the compiled function between runs.

Why not numba's `prange`: its thread pool is a second one beside torch's. Between two torch operations the
threads of torch's OpenMP spin, and a second pool has to wait for the core they spin on; numba's built-in
"workqueue" layer, moreover, aborts the process when two Python threads call it at once. So the function runs
on the OpenMP threads torch already has (`GOMP_parallel`, exported by libgomp, libiomp5 and libomp alike), and on
Python threads where torch was built without them.

The work is handed out in units (`units`), so an uneven or disturbed thread costs little. Needs numba: only `cpu.py`
files import this.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from numba import cfunc, types

from kernels import simd, units
from kernels.errors import KernelArgumentError

_OPENMP_LIBRARY = re.compile(r"/\S*/lib(?:gomp|iomp5|omp)[-.\w]*\.so[.\d]*$", re.MULTILINE)
_call_at = functools.cache(ctypes.CFUNCTYPE(None, ctypes.c_void_p))
_unit_at = functools.cache(ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64))
ThreadTeam = Callable[[int, int, int], None]


def compile_unit(make_entry: Callable[[int], Callable[[Any, int, int], None]], sources: tuple[ModuleType, ...]) -> int:
    """Compile make_entry(digest) into a function that does one unit (`units`); returns its address.

    The result is kept on disk (next to the package, else in the user's cache folder or NUMBA_CACHE_DIR); where
    none of them can be written, each process compiles anew. numba notices a change of the file that defines the
    function, but not of the files it calls into. It does compare the variables of a closure: hence the digest
    of the sources, which make_entry has to close over (and over nothing else that differs between processes).
    """
    return _compile(types.void(types.voidptr, types.int64, types.int64), make_entry, sources)


def compile_entry(make_entry: Callable[[int], Callable[[Any], None]], sources: tuple[ModuleType, ...]) -> int:
    """As compile_unit, for a function that each thread of a team calls once: `void (void *)`."""
    return _compile(types.void(types.voidptr), make_entry, sources)


def _compile(signature: Any, make_entry: Callable[[int], Any], sources: tuple[ModuleType, ...]) -> int:
    texts = "".join(inspect.getsource(source) for source in sources)
    entry = make_entry(int.from_bytes(hashlib.sha256(texts.encode()).digest()[:6]))
    try:
        compiled = cfunc(signature, cache=True)(entry)
    except RuntimeError:
        compiled = cfunc(signature)(entry)
    # The code lives as long as the object does.
    _compiled.append(compiled)
    return int(compiled.address)


_compiled: list[Any] = []


@functools.cache
def openmp_library() -> Any | None:
    """The OpenMP library loaded in this process, torch's own before others, or None; it has `GOMP_parallel`."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for path in sorted(set(_OPENMP_LIBRARY.findall(mapped)), key=lambda path: "torch" not in path):
        library = ctypes.CDLL(path)
        parallel = getattr(library, "GOMP_parallel", None)
        if parallel is not None:
            parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            parallel.restype = None
            return library
    return None


def run_on_openmp(function: int, argument: int, num_threads: int) -> None:
    """Call function(argument) on num_threads threads of torch's OpenMP team, this thread one of them."""
    library = openmp_library()
    if library is None:
        raise RuntimeError("this process has loaded no OpenMP library")
    library.GOMP_parallel(function, argument, num_threads, 0)


def run_on_python_threads(function: int, argument: int, num_threads: int) -> None:
    """Call function(argument) on num_threads threads, this thread one of them."""
    helpers = [threading.Thread(target=run_here, args=(function, argument)) for _ in range(num_threads - 1)]
    for helper in helpers:
        helper.start()
    run_here(function, argument)
    for helper in helpers:
        helper.join()


def run_here(function: int, argument: int) -> None:
    """Call function(argument) on this thread; the interpreter lock is released meanwhile."""
    _call_at(function)(argument)


@functools.cache
def default_team() -> ThreadTeam:
    """OpenMP where there is one."""
    return run_on_python_threads if openmp_library() is None else run_on_openmp


@dataclass(frozen=True)
class Work:
    """One call of a compiled function of units, with all that is needed to make it again.

    A unit may be done twice, the second time while what comes after the call has begun; so it reads nothing that the
    call writes.
    """

    function: int
    record: Any  # its argument, a ctypes object; the addresses in it stay good while `keeps` lives
    writes: tuple[torch.Tensor, ...]
    reads: tuple[torch.Tensor, ...]  # but for what nobody writes: weights, tables
    num_units: int = 1
    num_threads: int = 1  # worth waking for this call alone
    error: Any = None  # ctypes int64, zero at first
    errors: Mapping[int, str] | None = None  # what `error` says when it is not zero
    keeps: object = None


class Recorder(Protocol):
    """Told of every call on the thread that is `recording`."""

    def work(self, work: Work) -> None:
        """The call was made."""

    def scratch(self, bytes_per_thread: int, num_threads: int) -> int:
        """Address of working memory for at least so many threads, aligned to 64, that is still there when the call is
        made again."""


def run(work: Work, team: ThreadTeam | None = None) -> None:
    """Make the call. Raises KernelArgumentError for what the function says by its error."""
    argument = ctypes.addressof(work.record)
    if work.num_units == 1:
        _unit_at(work.function)(argument, 0, 0)
    else:
        counters = (ctypes.c_int64 * 2)()
        first = ctypes.addressof(counters)
        shared = units.CallRecord(work.function, argument, work.num_units, first, first + 8)
        if work.num_threads == 1:
            run_here(_share_units(), ctypes.addressof(shared))
        else:
            (team or default_team())(_share_units(), ctypes.addressof(shared), work.num_threads)
    raise_error(work)
    if _thread.recorder is not None:
        _thread.recorder.work(work)


def raise_error(work: Work) -> None:
    """Raises KernelArgumentError for what the function said by its error, if it did."""
    if work.errors and (code := work.error.value):
        raise KernelArgumentError(work.errors[code])


def _make_share(digest: int) -> Callable[[Any], None]:
    def entry(address):  # type: ignore[no-untyped-def]
        if digest >= 0:
            units.share_units(address)

    return entry


@functools.cache
def _share_units() -> int:
    return compile_entry(_make_share, (simd, units))


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Tell it of all calls that this thread makes meanwhile."""
    _thread.recorder = recorder
    try:
        yield
    finally:
        _thread.recorder = None


def is_recording() -> bool:
    """Whether calls may be made again on other data of the same shapes."""
    return _thread.recorder is not None


def scratch(bytes_per_thread: int, num_threads: int) -> int:
    """Address of working memory for each thread of a call, one after another, aligned to 64. Good until the next call
    on this thread."""
    if _thread.recorder is None:
        return _thread.scratch(bytes_per_thread * num_threads)
    return _thread.recorder.scratch(bytes_per_thread, num_threads)


class _Thread(threading.local):
    """Working memory, kept between calls; one per calling thread, so that calls may run side by side."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self._memory = np.empty(0, np.float32)
        self._address = 0

    def scratch(self, num_bytes: int) -> int:
        if self._memory.nbytes < num_bytes + 64:
            self._memory = np.empty((num_bytes + 64) // 4, np.float32)
            self._address = -(-int(self._memory.ctypes.data) // 64) * 64
        return self._address


_thread = _Thread()
