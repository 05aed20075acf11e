"""MLP speculator folders: what is loaded computes IBM's recurrence on the tensors of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.mlp_speculator import load_mlp_speculator
from outrider.drafting.checkpoints.recognise import recognise
from outrider.drafting.checkpoints.target_weights import TargetWeights
from tests.drafting.checkpoints import plain_writer as plain
from tests.drafting.heads import plain_math

HIDDEN = plain.numbers(4, plain.HIDDEN, seed=901)
TOKENS = [[1, 36, 0, 5], [7, 7, 2, 30], [9, 1, 1, 1]]


@pytest.mark.parametrize("prefix", ["speculator.", ""])
@pytest.mark.parametrize("scale_input", [True, False])
@pytest.mark.parametrize("inner_dim", [20, 0])
@pytest.mark.parametrize("is_tied", [True, False])
def test_every_variant_computes_the_recurrence(
    is_tied: bool, inner_dim: int, scale_input: bool, prefix: str, target: TargetWeights, tmp_path: Path
) -> None:
    width = inner_dim or plain.HIDDEN
    tensors = plain.mlp_tensors(width, is_tied=is_tied)
    config = plain.mlp_config(inner_dim=inner_dim, tie_weights=is_tied, scale_input=scale_input)
    folder = plain.write(tmp_path, config, plain.prefixed(tensors, prefix))
    assert recognise(folder) == "mlp_speculator"
    head = load_mlp_speculator(folder, target, torch.float32)
    wanted = plain_math.mlp_speculator(
        plain_math.doubled(tensors), HIDDEN.double(), TOKENS, width, is_tied=is_tied, scale_input=scale_input
    )
    state = head.start(HIDDEN)
    for step, token_ids in enumerate(TOKENS):
        state, logits = head.step(state, torch.tensor(token_ids), step)
        torch.testing.assert_close(logits.double(), wanted[step], atol=1e-5, rtol=0)
    assert head.config.top_k_tokens_per_head == (5, 4, 3)


def test_tied_tensors_may_be_stored_once_more_but_not_differently(target: TargetWeights, tmp_path: Path) -> None:
    tensors = plain.mlp_tensors(is_tied=True)
    for index in (1, 2):
        copies = {name.replace(".0.", f".{index}."): tensor for name, tensor in tensors.items() if "proj" not in name}
        tensors |= {name: tensor for name, tensor in copies.items() if f".{index}." in name}
    tensors["proj.2.weight"] = tensors["proj.1.weight"]
    folder = plain.write(tmp_path, plain.mlp_config(tie_weights=True), plain.prefixed(tensors, "speculator."))
    head = load_mlp_speculator(folder, target, torch.float32)
    assert len(head.emb) == 1
    tensors["emb.2.weight"] = tensors["emb.2.weight"] + 1
    plain.write(tmp_path, plain.mlp_config(tie_weights=True), plain.prefixed(tensors, "speculator."))
    with pytest.raises(CheckpointRefused, match=r"speculator\.emb\.2\.weight differs from speculator\.emb\.0\.weight"):
        load_mlp_speculator(folder, target, torch.float32)
