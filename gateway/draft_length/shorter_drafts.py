"""Prediction for shorter drafts than those measured: the rounds that they need for the tokens of one longer round.

Text that is easy to draft comes in runs. A long draft covers a run in one round, a short one in several, so a short
draft meets easy text more often. Acceptance measured with long drafts would underrate it (docs/log.md: bd9aba7).
"""

from __future__ import annotations

from collections.abc import Sequence


def num_shorter_rounds(survival: Sequence[float], num_draft_tokens: int, acceptance: float) -> float:
    """Mean number of rounds with `num_draft_tokens` that bring the tokens of one round with len(survival).

    survival: probabilities that the first 1, 2, ... draft tokens of the longer round are all accepted.
    num_draft_tokens: 1 to len(survival). acceptance: per token, for tokens beyond the longer draft.

    The smaller of two upper bounds. Continuation: a longer round of a + 1 tokens becomes
    ceil((a + 1) / (num_draft_tokens + 1)) shorter ones; exact if acceptance depends on the text alone. Truncation: the
    shorter draft is the beginning of the longer one; exact if acceptance depends on the position alone, as with heads,
    whose later tokens are worse than newly drafted ones.
    """
    longest, step = len(survival), num_draft_tokens + 1
    continued = 1.0 + sum(survival[start - 1] for start in range(step, longest + 1, step))
    over = (longest + 1) % step
    if over:  # a fully accepted draft continues in the next round, and so does the last of its shorter rounds
        continued -= survival[-1] * (1.0 - _part(over, num_draft_tokens, acceptance))
    truncated = (1.0 + sum(survival)) / (1.0 + sum(survival[:num_draft_tokens]))
    return min(continued, truncated)


def _part(num_tokens: int, num_draft_tokens: int, acceptance: float) -> float:
    """The first num_tokens as a share of a shorter round. It makes both bounds equal under one acceptance for all."""
    chances = [acceptance**position for position in range(num_draft_tokens + 1)]
    return (1.0 + sum(chances[num_draft_tokens - num_tokens + 2 :])) / sum(chances)
