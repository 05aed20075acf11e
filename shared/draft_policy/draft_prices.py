"""The draft lengths that a verifier prices.

A length is the mean over the sessions of a forward, so it may be a fraction: n-grams often propose for some sessions
only. Row costs are a step function, so every length has a price of its own (docs/log.md: 5360f68).
"""

from __future__ import annotations

# draft tokens per session; between two of them the price is interpolated; 5360f68
PRICED_DRAFTS: tuple[float, ...] = (1 / 16, *(quarters / 4 for quarters in range(1, 17)), 5.0, 6.0, 7.0, 8.0)
