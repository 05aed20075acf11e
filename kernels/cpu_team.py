"""Running one compiled function on several threads, and keeping the compiled function between runs.

Why not numba's `prange`: its thread pool is a second one beside torch's. Between two torch operations the
threads of torch's OpenMP spin, and a second pool has to wait for the core they spin on; numba's built-in
"workqueue" layer, moreover, aborts the process when two Python threads call it at once. So the function runs
on the OpenMP threads torch already has (`GOMP_parallel`, exported by libgomp, libiomp5 and libomp alike), and on
Python threads where torch was built without them.

The work is handed out by a shared counter, so an uneven or disturbed thread costs little; results must not
depend on who does what. Needs numba: only `cpu.py` files import this.
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
from numba import cfunc, types

from kernels.errors import KernelArgumentError

_OPENMP_LIBRARY = re.compile(r"/\S*/lib(?:gomp|iomp5|omp)[-.\w]*\.so[.\d]*$", re.MULTILINE)
_call_at = functools.cache(ctypes.CFUNCTYPE(None, ctypes.c_void_p))
ThreadTeam = Callable[[int, int, int], None]


def compile_entry(make_entry: Callable[[int], Callable[[Any], None]], sources: tuple[ModuleType, ...]) -> int:
    """Compile make_entry(digest) into a C function `void (void *)`; returns its address.

    The result is kept on disk (next to the package, else in the user's cache folder or NUMBA_CACHE_DIR); where
    none of them can be written, each process compiles anew. numba notices a change of the file that defines the
    function, but not of the files it calls into. It does compare the variables of a closure: hence the digest
    of the sources, which make_entry has to close over (and over nothing else that differs between processes).
    """
    texts = "".join(inspect.getsource(source) for source in sources)
    entry = make_entry(int.from_bytes(hashlib.sha256(texts.encode()).digest()[:6]))
    signature = types.void(types.voidptr)
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
    """One call of a compiled function `void (void *)`, with all that is needed to make it again."""

    function: int
    record: Any  # its argument, a ctypes object; the addresses in it stay good while `keeps` lives
    num_threads: int = 1
    counters: Any = None  # ctypes array of int64 that the function finds all zero
    errors: Mapping[int, str] | None = None  # what the last counter says when it is not zero
    keeps: object = None


class Recorder(Protocol):
    """Told of every call on the thread that is `recording`."""

    def work(self, work: Work) -> None:
        """The call was made."""

    def scratch(self, num_bytes: int) -> int:
        """Address of working memory that is still there when the call is made again, aligned to 64."""


def run(work: Work, team: ThreadTeam | None = None) -> None:
    """Make the call. Raises KernelArgumentError for what the function says of its last counter."""
    argument = ctypes.addressof(work.record)
    if work.num_threads == 1:
        run_here(work.function, argument)
    else:
        (team or default_team())(work.function, argument, work.num_threads)
    raise_error(work)
    if _thread.recorder is not None:
        _thread.recorder.work(work)


def raise_error(work: Work) -> None:
    """Raises KernelArgumentError for what the function said of its last counter, if it did."""
    if work.errors and (code := work.counters[-1]):
        raise KernelArgumentError(work.errors[code])


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


def scratch(num_bytes: int) -> int:
    """Address of num_bytes bytes of working memory, aligned to 64. Good until the next call on this thread."""
    return _thread.scratch(num_bytes) if _thread.recorder is None else _thread.recorder.scratch(num_bytes)


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
