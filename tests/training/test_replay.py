"""Tokens per round, counted by hand; and a replayed layer drafts what its equations say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.drafting.checkpoints.mtp import load_mtp
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.mtp import MtpObjective
from outrider.training.replay import head_drafter, tokens_per_round
from tests.drafting.mtp_targets import save_mtp_target

TEXT = [7, 8, 9, 7, 8, 9, 7, 8, 9, 5, 6]
NUM_DRAFTED = 3


def row(prompt_len: int) -> dict[str, Any]:
    return {"prompt_token_ids": TEXT[:prompt_len], "token_ids": TEXT[prompt_len:]}


def test_rounds_of_drafts_that_are_right_wrong_or_absent() -> None:
    """Eight tokens after the prompt's own one: rounds of 4 and 4, or of one each."""
    right = tokens_per_round([row(2)], 3, lambda text, _: lambda known, count: text[len(known) : len(known) + count])
    wrong = tokens_per_round([row(2)], 3, lambda _text, _: lambda _known, count: [0] * count)
    absent = tokens_per_round([row(2)], 3, lambda _text, _: lambda _known, _count: [])
    assert (right, wrong, absent) == (4.0, 1.0, 1.0)


def test_the_mean_is_over_rounds_of_all_rows() -> None:
    """Two right drafts in one row, none in the other: 8 tokens in 3 rounds and 4 in 4."""

    def drafter(text: list[int], prompt_len: int) -> Any:
        return lambda known, _count: text[len(known) : len(known) + 2] if prompt_len == 2 else []

    assert tokens_per_round([row(2), row(6)], 2, drafter) == 12 / 7


def test_an_answer_of_one_token_has_no_round() -> None:
    assert tokens_per_round([row(10)], 3, lambda _text, _: lambda _known, _count: [6]) == 0.0


def test_an_mtp_layer_drafts_what_its_equations_say(tmp_path: Path) -> None:
    written = save_mtp_target("qwen3_5", tmp_path / "target")
    target = FrozenTarget(written.folder, torch.float32)
    head = MtpObjective(load_mtp(written.folder, torch.float32), written.folder).eval().head
    text = torch.randint(0, 61, (9,), generator=torch.Generator().manual_seed(5)).tolist()
    features = target.view(torch.tensor([text]), head.feature_layers).features[0]
    propose, known = head_drafter(head, target)(text, 2), 5
    rows, expected = features[: known - 1], []
    for _step in range(NUM_DRAFTED):
        rows = torch.cat((rows, written.equations(text[1 : len(rows) + 1], rows)[-1:]))
        expected.append(int(written.logits(rows[-1]).argmax()))
    assert propose(text[:known], NUM_DRAFTED) == expected
