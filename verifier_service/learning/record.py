"""What a learner has done so far, for metrics and for the verifier's own report."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from statistics import fmean

from prometheus_client import CollectorRegistry, Counter, Gauge

from outrider.shared.messages import Learning

_TOKENS = {"taken": "num_tokens", "dropped": "num_dropped_tokens", "private": "num_private_tokens"}


class LearningRecord:
    """Counts, from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        self._now = Learning()
        self._tokens = Counter(
            "outrider:learner_tokens",
            "Output tokens of ended sessions: taken to learn from, dropped as the learner was behind, or private.",
            ["outcome"],
            registry=registry,
        )
        self._heads = Counter(
            "outrider:learned_heads",
            "Heads in training: refused by the judgement, taken after a trial, or rolled_back by it.",
            ["outcome"],
            registry=registry,
        )
        self._length = Gauge(
            "outrider:learner_tokens_per_round",
            "Expected tokens a round on held-back text, at the last judgement, of the serving and the learned head.",
            ["head", "law"],
            registry=registry,
        )

    @property
    def now(self) -> Learning:
        return self._now

    def count_tokens(self, outcome: str, num_tokens: int) -> None:
        """outcome: taken, dropped or private."""
        self._tokens.labels(outcome).inc(num_tokens)
        self._add(_TOKENS[outcome], num_tokens)

    def count_head(self, outcome: str, refusal: str = "") -> None:
        """outcome: refused, with the reason, taken or rolled_back."""
        self._heads.labels(outcome).inc()
        self._add(f"num_{outcome}", 1)
        if refusal:
            with self._lock:
                self._now = dataclasses.replace(self._now, refusal=refusal)

    def judged(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Records expected tokens a round by law: of greedy rounds, and at temperature 1 ("sampled")."""
        for head, lengths in (("serving", before), ("learned", after)):
            for law in ("greedy", "sampled"):
                self._length.labels(head, law).set(lengths[law])
        with self._lock:
            self._now = dataclasses.replace(
                self._now, tokens_before=fmean(before.values()), tokens_after=fmean(after.values())
            )

    def _add(self, name: str, number: int) -> None:
        with self._lock:
            self._now = dataclasses.replace(self._now, **{name: getattr(self._now, name) + number})
