"""Records of numbers and addresses: the one argument of a compiled kernel (a call takes about 1 us).

Fields are declared as a NamedTuple of int (int64) and float (float64). Needs numba: only `cpu*.py` files import this.
"""

from __future__ import annotations

import ctypes
from typing import Any, get_type_hints

import numpy as np

_CTYPES = {int: ctypes.c_int64, float: ctypes.c_double}
_NUMPY = {int: np.int64, float: np.float64}


def record_types(fields: type) -> tuple[Any, np.dtype[Any]]:
    """A ctypes structure to fill and the numpy dtype under which compiled code reads it."""
    hints = get_type_hints(fields)
    structure = type(fields.__name__, (ctypes.Structure,), {"_fields_": [(n, _CTYPES[k]) for n, k in hints.items()]})
    return structure, np.dtype([(name, _NUMPY[kind]) for name, kind in hints.items()])
