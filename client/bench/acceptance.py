"""Accepted draft tokens of a benchmark: from the server's answers, or else from the growth of its /metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import httpx

from outrider.client.metrics_text import sums

_PREFIXES = ("outrider:", "vllm:")
_NAMES = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@dataclass(frozen=True)
class Acceptance:
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int

    def __sub__(self, earlier: Acceptance) -> Acceptance:
        return Acceptance(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
        )

    @property
    def rate(self) -> float:
        """Accepted share of the draft tokens; 0 without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def length(self) -> float:
        """Mean tokens per drafted round: the accepted ones plus the target's own."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


def total(parts: Iterable[Acceptance]) -> Acceptance:
    counts = [(part.num_drafts, part.num_draft_tokens, part.num_accepted_tokens) for part in parts]
    return Acceptance(*(sum(column) for column in zip(*counts, strict=True))) if counts else Acceptance(0, 0, 0)


async def counted_by_server(client: httpx.AsyncClient) -> Acceptance | None:
    """The server's counters since its start; None if it has none (vLLM has them under its own names)."""
    try:
        reply = await client.get("/metrics")
    except httpx.TransportError:
        return None
    if reply.status_code != 200:
        return None
    found = sums(reply.text)
    for prefix in _PREFIXES:
        counts = [found.get(f"{prefix}spec_decode_{name}_total") for name in _NAMES]
        if counts[0] is not None:
            return Acceptance(*(int(count or 0) for count in counts))
    return None
