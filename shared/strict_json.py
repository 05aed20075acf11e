"""One reader of JSON from outside, of bodies and of the JSON in their fields. What it returns can be written again.

Not here: JSON that models write, with its mistakes (gateway/tool_calls/lenient_json.py).
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from outrider.shared.errors import InvalidRequest

# levels; lists and objects within each other: what reads or writes JSON recurses, and Python's stack holds 1,000 calls
MAX_DEPTH = 200
# Escaped surrogates: a pair is one character, a lone one is not text.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def strict_json(text: str, what: str, param: str | None = None) -> Any:
    """The value of a JSON text whose numbers are finite and whose strings can be encoded. Raises InvalidRequest, which
    calls the text `what`.
    """

    def refuse(reason: str) -> NoReturn:
        raise InvalidRequest(f"{what} {reason}", param=param) from None

    try:
        value = _DECODER.decode(text)
    except _NotFinite as error:
        refuse(str(error))
    except json.JSONDecodeError as error:
        refuse(f"is not JSON: {error.msg} at line {error.lineno} column {error.colno}")
    except RecursionError:
        refuse("is nested too deeply")
    except ValueError:  # an integer with thousands of digits
        refuse("has a number with too many digits")
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        refuse(f"is nested too deeply: more than {MAX_DEPTH} levels")
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            refuse("has a lone surrogate, which is not text")
    return value


class _NotFinite(Exception):
    """A number that JSON does not have."""


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _NotFinite(f"has {digits[:40]}, which is beyond the range of numbers")
    return number


def _constant(name: str) -> NoReturn:
    raise _NotFinite(f"has {name}, which is not JSON")


# Made once: json.loads makes one each time that it is called with an option.
_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_constant)


def _is_deeper(value: Any, levels: int) -> bool:
    """Returns whether containers are nested deeper than `levels`; walks them breadth-first, one level at a time."""
    nodes = [value] if isinstance(value, list | dict) else []
    for _ in range(levels):
        children = (child for node in nodes for child in (node.values() if type(node) is dict else node))
        nodes = [child for child in children if isinstance(child, list | dict)]
        if not nodes:
            return False
    return True
