"""Replays drafting along a target's greedy text: how many tokens a round brings.

A round drafts, keeps the draft tokens that agree with the text, and adds one. The mean is over all rounds, also those
without a draft. Not here: tokens per second, and acceptance through the services (evaluate_heads.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from outrider.drafting.heads.eagle3 import Eagle3Head
from outrider.drafting.heads.mtp import MtpHead
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.unroll import EVAL_DEPTHS, unroll

# (committed tokens, wanted number) -> draft tokens
Propose = Callable[[list[int], int], list[int]]


def tokens_per_round(
    rows: Sequence[dict[str, Any]], draft_len: int, drafter: Callable[[list[int], int], Propose]
) -> float:
    """All new tokens by all rounds; 0 without a round. The first token of each row comes from its prompt alone and is
    not counted.

    rows: `prompt_token_ids` and `token_ids`. drafter: (whole row, length of its prompt) -> its `Propose`.
    """
    num_rounds = num_tokens = 0
    for row in rows:
        prompt_len, text = len(row["prompt_token_ids"]), [*row["prompt_token_ids"], *row["token_ids"]]
        propose, known = drafter(text, prompt_len), prompt_len + 1
        num_tokens += max(0, len(text) - known)
        while known < len(text):
            for token in propose(text[:known], draft_len):
                if known == len(text) or token != text[known]:
                    break
                known += 1
            known += 1
            num_rounds += 1
    return num_tokens / num_rounds if num_rounds else 0.0


def head_drafter(head: MtpHead | Eagle3Head, target: FrozenTarget) -> Callable[[list[int], int], Propose]:
    """The greedy chains, of up to EVAL_DEPTHS tokens, of a layer or head that was built with TTT_ATTENTION."""

    @torch.no_grad()
    def of_row(text: list[int], prompt_len: int) -> Propose:
        rows = torch.tensor([text], device=target.device)
        features = head.fuse(target.view(rows, head.feature_layers).features)
        steps = unroll(head, rows, features, EVAL_DEPTHS)
        guesses = torch.stack([head.logits(state)[0].argmax(-1) for state in steps])  # [depth, position]
        if head.target_ids is not None:
            guesses = head.target_ids[guesses]
        chains = guesses.T.tolist()
        # Row t of depth d guesses token t + 2 + d, the tokens before it being the text's.
        return lambda known, count: chains[len(known) - 2][:count] if len(known) < len(text) else []

    return of_row
