"""One finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """The result of a check.

    advice: what to do; empty if all is well. Level "warn": it runs, but slower or less safely.
    """

    name: str
    level: Level
    found: str
    advice: str = ""
