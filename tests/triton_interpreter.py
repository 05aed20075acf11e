"""Triton's interpreter replaces the builtins of its language at every call of a function, those of helpers too.

It searches modules and classes for them each time: a quarter of an interpreted linear (triton 3.7, 82 → 62 ms). Which
names are builtins does not change, so here they are searched for once. What is replaced, and by what, stays the same.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

_INTERPRETER = "triton.runtime.interpreter"


def search_builtins_once() -> None:
    """Does nothing where the interpreter is not loaded."""
    interpreter: Any = sys.modules.get(_INTERPRETER)
    if interpreter is None:
        return
    is_builtin, replace = interpreter.tl.core.is_builtin, interpreter._patch_attr

    @functools.cache
    def names_of(package: Any) -> tuple[str, ...]:
        return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))

    def replace_builtins(package: Any, builder: Any, scope: Any) -> None:
        for name in names_of(package):
            member = getattr(package, name)
            if is_builtin(member):  # else it is replaced already, by the function that calls this one
                replace(package, name, member, builder, scope)

    interpreter._patch_builtin = replace_builtins
