"""What was sent and what came of it. A finding is a sentence about one thing that must not happen."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field


class Finding(Exception):
    """An input did what no input may do."""


@dataclass
class Tally:
    outcomes: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    findings: list[str] = field(default_factory=list)
    slowest_s: dict[str, float] = field(default_factory=dict)
    num_bystander_streams: int = 0

    def count(self, target: str, outcomes: Sequence[str], seconds: float) -> None:
        self.outcomes[target].update(outcomes)
        self.slowest_s[target] = max(self.slowest_s.get(target, 0.0), seconds)

    @property
    def num_inputs(self) -> int:
        return sum(counter.total() for counter in self.outcomes.values())
