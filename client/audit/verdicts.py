"""Verdicts, and the report that a run collects them in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    PASS = "holds"
    FAIL = "broken"
    DIFFERS = "differs"
    NOTE = "note"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Finding:
    """The result of one test, with what it could have found."""

    test: str
    verdict: Verdict
    evidence: str
    sensitivity: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    replays: tuple[int, ...] = ()  # indices of Report.replays


@dataclass(frozen=True)
class Replay:
    """Requests that showed a failure, and what was expected of them: one line of a replay file."""

    test: str
    expected: str
    requests: tuple[Mapping[str, Any], ...]
    texts: tuple[str, ...]
    path: str
    at_once: bool = False  # the failure needs the requests beside each other


@dataclass(frozen=True)
class Report:
    server: str
    model: str
    version: str
    seed: int
    abilities: Mapping[str, Any]
    findings: tuple[Finding, ...]
    replays: tuple[Replay, ...]
    num_requests: int
    num_tokens: int
    seconds: float
    stopped: str = ""  # why the audit ended early

    @property
    def is_broken(self) -> bool:
        return any(finding.verdict is Verdict.FAIL for finding in self.findings)

    @property
    def differs(self) -> bool:
        return any(finding.verdict is Verdict.DIFFERS for finding in self.findings)

    @property
    def is_complete(self) -> bool:
        """Whether the audit reached its end and anything at all could be tested."""
        return not self.stopped and any(finding.verdict is not Verdict.NOT_TESTED for finding in self.findings)

    @property
    def conclusion(self) -> str:
        stopped = f"; stopped early: {self.stopped}" if self.stopped else ""
        if self.is_broken:
            return "broken" + stopped
        if not self.is_complete:
            return "nothing could be tested" if not stopped else "no defect found" + stopped
        seen = "" if self.abilities.get("drafts_seen") else "; no drafts were seen"
        return "no defect found" + ("; greedy answers differ" if self.differs else "") + seen
