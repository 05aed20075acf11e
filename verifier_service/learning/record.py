"""What a learner has done so far, for metrics and for the verifier's own report."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from statistics import fmean

from prometheus_client import CollectorRegistry

from outrider.shared.messages import Learning
from outrider.shared.telemetry import MetricsOf

_TOKENS = {"taken": "num_tokens", "dropped": "num_dropped_tokens", "private": "num_private_tokens"}


class LearningRecord:
    """Counts, from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        self._now = Learning()
        make = MetricsOf(registry)
        self._tokens = make.counter(
            "learner_tokens",
            "Output tokens of ended sessions: taken to learn from, dropped as the learner was behind or had no place "
            "for their salt, or private.",
            ("outcome",),
        )
        self._heads = make.counter(
            "learned_heads",
            "Heads in training: refused by the judgement, taken after a trial, or rolled_back by it.",
            ("outcome",),
        )
        self._length = make.gauge(
            "learner_tokens_per_round",
            "Expected tokens a round on held-back text, at the last judgement, of the serving and the learned head.",
            ("head", "law"),
        )
        self._salts = make.gauge(
            "learner_salts",
            "Cache salts whose text is learned from apart, and those of them that a learned head drafts for.",
            ("have",),
        )
        self._num_salts = self._num_salt_heads = _none

    @property
    def now(self) -> Learning:
        return dataclasses.replace(self._now, num_salts=self._num_salts(), num_salt_heads=self._num_salt_heads())

    def watch_salts(self, num_salts: Callable[[], int], num_heads: Callable[[], int]) -> None:
        """Reports these numbers from now on, whoever asks from any thread."""
        self._num_salts, self._num_salt_heads = num_salts, num_heads
        self._salts.labels("text").set_function(num_salts)
        self._salts.labels("head").set_function(num_heads)

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


def _none() -> int:
    return 0
