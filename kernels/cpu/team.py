"""Runs a compiled function on several threads, and caches compiled functions on disk.

Threads: torch's OpenMP team (`GOMP_parallel`, exported by libgomp, libiomp5 and libomp), or Python threads where torch
was built without OpenMP. Not numba's `prange`: its pool competes for cores with torch's spinning threads, and its
"workqueue" layer aborts the process if two Python threads call it at once.

Work is divided into units (`units`), so a slow thread costs little. Needs numba: only `cpu*.py` files import this.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import hashlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol

import numpy as np
import torch
from numba import cfunc, types

from outrider.kernels.cpu import units
from outrider.kernels.errors import KernelArgumentError

_OPENMP_LIBRARY = re.compile(r"/\S*/lib(?:gomp|iomp5|omp)[-.\w]*\.so[.\d]*$", re.MULTILINE)
_call_at = functools.cache(ctypes.CFUNCTYPE(None, ctypes.c_void_p))
_unit_at = functools.cache(ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64))
ThreadTeam = Callable[[int, int, int], None]


@functools.cache
def compile_unit(run: Any) -> int:
    """Compile run(address, unit, thread), a numba function, into one that executes a unit (`units`).

    Returns its address. Cached next to the package, else in the user's cache folder or NUMBA_CACHE_DIR; if none is
    writable, each process compiles.
    """
    return _compile(types.void(types.voidptr, types.int64, types.int64), _make_unit, run)


@functools.cache
def compile_entry(run: Any) -> int:
    """Compile run(address) like compile_unit, into a `void (void *)` that each thread of a team calls once."""
    return _compile(types.void(types.voidptr), _make_entry, run)


def _make_unit(digest: int) -> Any:
    def entry(address, unit, thread):  # type: ignore[no-untyped-def]
        if digest >= 0:
            _run(address, unit, thread)

    return entry


def _make_entry(digest: int) -> Any:
    def entry(address):  # type: ignore[no-untyped-def]
        if digest >= 0:
            _run(address)

    return entry


_run: Any = None  # in the globals that _compile gives an entry: the function that it calls


def _compile(signature: Any, make_entry: Callable[[int], Any], run: Any) -> int:
    """numba's cache compares an entry's closure and name, not what it calls: hence the digest of all sources."""
    name = f"{run.__module__}.{run.__qualname__}"
    texts = "".join([name, *_sources(run.__module__, {}).values()])
    template = make_entry(int.from_bytes(hashlib.sha256(texts.encode()).digest()[:6]))
    entry = FunctionType(template.__code__, {"__name__": __name__, "_run": run}, closure=template.__closure__)
    entry.__qualname__ = name
    try:
        compiled = cfunc(signature, cache=True)(entry)
    except RuntimeError:
        compiled = cfunc(signature)(entry)
    # The machine code lives as long as this object.
    _compiled.append(compiled)
    return int(compiled.address)


def _sources(module: str, texts: dict[str, str]) -> dict[str, str]:
    """Adds the texts of the module and of all modules of `kernels` that it imports, directly or not, by name."""
    if module not in texts:
        texts[module] = Path(str(sys.modules[module].__file__)).read_text()
        for node in ast.parse(texts[module]).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("outrider.kernels"):
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    if name in sys.modules:
                        _sources(name, texts)
    return texts


_compiled: list[Any] = []


@functools.cache
def openmp_library() -> Any | None:
    """The loaded OpenMP library that exports `GOMP_parallel`, torch's own first; None if there is none."""
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
    """Call function(argument) on this thread, with the GIL released."""
    _call_at(function)(argument)


@functools.cache
def default_team() -> ThreadTeam:
    """OpenMP if loaded, else Python threads."""
    return run_on_python_threads if openmp_library() is None else run_on_openmp


@dataclass(frozen=True)
class Work:
    """One call of a function over all its units, with all that a replay needs.

    A unit must not read what the call writes: it may be executed twice, the second time while later calls run.
    """

    unit: Any  # unit(address of the record, unit, thread), a numba function
    record: Any  # its argument, a ctypes object; its addresses are valid while `keeps` lives
    writes: tuple[torch.Tensor, ...]
    reads: tuple[torch.Tensor, ...]  # without what nobody writes: weights, tables
    num_units: int = 1
    num_threads: int = 1  # threads worth waking for this call alone
    error: Any = None  # ctypes int64, initially zero
    errors: Mapping[int, str] | None = None  # messages of non-zero `error` values
    keeps: object = None


class Recorder(Protocol):
    """Receives every call made on a thread that is `recording`."""

    def work(self, work: Work) -> None:
        """Called after the call was made."""

    def scratch(self, bytes_per_thread: int, num_threads: int) -> int:
        """Address of scratch memory for at least num_threads threads, aligned to 64 bytes, still valid at a replay."""


def run(work: Work, team: ThreadTeam | None = None) -> None:
    """Make the call. Raises KernelArgumentError if the function sets its error."""
    argument = ctypes.addressof(work.record)
    if work.num_units == 1:
        _unit_at(compile_unit(work.unit))(argument, 0, 0)
    else:
        counters = (ctypes.c_int64 * 2)()
        first = ctypes.addressof(counters)
        shared = units.CallRecord(compile_unit(work.unit), argument, work.num_units, first, first + 8)
        if work.num_threads == 1:
            run_here(compile_entry(units.share_units), ctypes.addressof(shared))
        else:
            (team or default_team())(compile_entry(units.share_units), ctypes.addressof(shared), work.num_threads)
    raise_error(work)
    if _thread.recorder is not None:
        _thread.recorder.work(work)


def raise_error(work: Work) -> None:
    """Raises KernelArgumentError if the function has set its error, once: a program may not run all its calls again."""
    if work.errors and (code := work.error.value):
        work.error.value = 0
        raise KernelArgumentError(work.errors[code])


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Reports all calls that this thread makes meanwhile to the recorder."""
    _thread.recorder = recorder
    try:
        yield
    finally:
        _thread.recorder = None


def is_recording() -> bool:
    """Returns whether this thread's calls may be replayed on other data of the same shapes."""
    return _thread.recorder is not None


def scratch(bytes_per_thread: int, num_threads: int) -> int:
    """Address of contiguous scratch memory per thread, aligned to 64 bytes. Valid until this thread's next call."""
    if _thread.recorder is None:
        return _thread.scratch(bytes_per_thread * num_threads)
    return _thread.recorder.scratch(bytes_per_thread, num_threads)


class _Thread(threading.local):
    """Scratch memory, kept between calls; one per calling thread, so calls may run concurrently."""

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
