"""Block heads' folders in every layout: what is loaded computes the published equations on the tensors of the file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.drafting.checkpoints.block import load_block
from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.recognise import recognise
from outrider.drafting.checkpoints.target_weights import TargetWeights
from outrider.drafting.heads.block import BlockHead
from tests.drafting.checkpoints import plain_writer as plain
from tests.drafting.heads import plain_math

NUM_CONTEXT, LAST_TOKEN, DRAFTED = 5, 9, [3, 36, 0]
STATES = plain.numbers(NUM_CONTEXT, 3 * plain.HIDDEN, seed=910)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A folder's config and tensors, and what the equations must be given."""

    kind: str
    config: dict[str, Any]
    tensors: plain.Tensors
    sees_later: tuple[bool, ...]
    layers: tuple[int, ...] = (1, 3, 5)
    markov: str | None = None
    theta: float = 10000.0

    @property
    def first_row(self) -> int:
        return 0 if self.kind == "dspark" else 1


def dspark(kind: str, **config: Any) -> Layout:
    tensors = plain.block_tensors() | plain.markov_tensors(kind) | plain.copies_of_the_targets()
    settings = plain.deepspec_config(markov_head_type=kind, **config)
    return Layout("dspark", settings, tensors, (True,), layers=(0, 3, 5), markov=kind)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
REDUCED = plain.block_tensors() | plain.reduced_tensors()
LAYOUTS = {
    "z-lab": Layout("dflash", plain.zlab_config(), plain.block_tensors(), (True,)),
    "z-lab, two layers, one sliding": Layout(
        "dflash",
        plain.zlab_config(num_hidden_layers=2, **SLIDING),
        plain.block_tensors(num_layers=2),
        (False, True),
    ),
    "z-lab, no base of RoPE": Layout(
        "dflash",
        plain.zlab_config(rope_theta=None),
        plain.block_tensors(),
        (True,),
        theta=1e6,
    ),
    "JetSpec": Layout("dflash", plain.zlab_config({"causal_head": True}), plain.block_tensors(), (False,)),
    "SpecForge's DSpark": Layout(
        "dspark",
        plain.zlab_config({"projector_type": "dspark", "markov_rank": plain.MARKOV_RANK}),
        plain.block_tensors() | plain.markov_tensors(),
        (True,),
        markov="vanilla",
    ),
    "DeepSpec": dspark("vanilla"),
    "DeepSpec, causal": dataclasses.replace(dspark("vanilla", is_causal=True), sees_later=(False,)),
    "DeepSpec, gated": dspark("gated"),
    "DeepSpec, rnn": dspark("rnn"),
    "DeepSpec's DFlash": Layout(
        "dspark",
        plain.deepspec_config(markov_rank=0, enable_confidence_head=False),
        plain.block_tensors() | plain.copies_of_the_targets(),
        (True,),
        layers=(0, 3, 5),
    ),
    "speculators' DFlash": Layout("dflash", plain.block_speculators_config("dflash"), REDUCED, (True,)),
    "speculators' DSpark": Layout(
        "dspark",
        plain.block_speculators_config("dspark", markov_rank=plain.MARKOV_RANK),
        REDUCED | plain.markov_tensors(draft_vocab=plain.DRAFT_VOCAB),
        (True,),
        markov="vanilla",
    ),
}


def outputs_of(head: BlockHead, states: torch.Tensor) -> torch.Tensor:
    """The head's outputs [block rows, H], with masks in place of a paged cache."""
    num_rows, total = plain.BLOCK_SIZE, plain.BLOCK_SIZE + len(states)
    token_ids = torch.tensor([[LAST_TOKEN, *[plain.MASK_TOKEN] * (num_rows - 1)]])
    positions = torch.tensor([[*range(len(states), total), *range(len(states))]])

    def attention(is_causal: bool) -> dict[str, torch.Tensor]:
        sees = torch.eye(total, dtype=torch.bool)
        sees[:num_rows, num_rows:] = True
        sees[:num_rows, :num_rows] = plain_math.causal(num_rows) if is_causal else True
        return {"attention_mask": torch.where(sees, 0.0, float("-inf"))[None, None]}

    found: torch.Tensor = head(token_ids, head.fuse(states)[None], positions, attention)[0]
    return found


@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_every_layout_computes_the_published_head(name: str, target: TargetWeights, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    folder = plain.write(tmp_path, layout.config, layout.tensors)
    assert recognise(folder) == layout.kind
    head = load_block(folder, target, torch.float32, attn_implementation="eager")
    assert head.feature_layers == layout.layers
    assert head.config.max_num_draft_tokens == plain.BLOCK_SIZE - layout.first_row
    theirs = plain_math.doubled(layout.tensors)
    own = plain_math.doubled(plain.target_tensors())
    shape = plain_math.Shape(plain.HEADS, plain.KV_HEADS, plain.HEAD_DIM, theta=layout.theta)
    wanted = plain_math.block_outputs(
        theirs,
        own["model.embed_tokens.weight"],
        LAST_TOKEN,
        plain.MASK_TOKEN,
        plain.BLOCK_SIZE,
        STATES.double(),
        list(layout.sees_later),
        shape,
    )
    found = outputs_of(head, STATES)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)
    lm_head = theirs.get("lm_head.weight", own["lm_head.weight"])
    found_state, state = None, torch.zeros(plain.MARKOV_RANK, dtype=torch.float64)
    for row, previous in enumerate([LAST_TOKEN, *DRAFTED][: plain.BLOCK_SIZE - layout.first_row], layout.first_row):
        logits = wanted[row] @ lm_head.T
        if layout.markov is not None:
            memory, state = plain_math.markov_memory(theirs, layout.markov, wanted[row], previous, state)
            logits = logits + theirs["markov_head.markov_w2.weight"] @ memory
        output = found[row][None]
        found_logits, found_state = head.biased(head.lm_head(output), output, torch.tensor([previous]), found_state)
        torch.testing.assert_close(found_logits[0].double(), logits, atol=1e-5, rtol=0)


def test_copies_of_the_targets_matrices_are_not_kept(target: TargetWeights, tmp_path: Path) -> None:
    layout = LAYOUTS["DeepSpec"]
    head = load_block(plain.write(tmp_path, layout.config, layout.tensors), target, torch.float32)
    assert head.lm_head.weight.data_ptr() == target.lm_head.data_ptr()
    assert head.embed_tokens.weight.data_ptr() == target.embedding.data_ptr()


def test_layers_that_no_config_names_are_spread_evenly(target: TargetWeights, tmp_path: Path) -> None:
    config = plain.zlab_config({"target_layer_ids": None}, num_hidden_layers=3)
    folder = plain.write(tmp_path, config, plain.block_tensors(num_layers=3))
    assert load_block(folder, target, torch.float32).feature_layers == (2, 3, 4)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (plain.zlab_config({"mask_token_id": None}), {}, "names no mask token"),
        (plain.zlab_config({"mask_token_id": plain.VOCAB}), {}, "mask_token_id is 37, not a whole number from 0 to 36"),
        (plain.zlab_config({"target_layer_ids": [0, 2, 5]}), {}, r"names layer 5 .*at most 4 can be read"),
        (plain.zlab_config({"attention_sink_bias": True}), {}, "attention_sink_bias is True, which is not computed"),
        (plain.zlab_config({"projector_type": "domino"}), {}, "projector_type is 'domino'"),
        (plain.zlab_config(block_size=1), {}, "block_size=1 drafts nothing"),
        (plain.zlab_config(layer_types=["sliding_attention"]), {}, "sliding_window is absent"),
        (plain.zlab_config(layer_types=["chunked_attention"]), {}, "layer_types is"),
        (plain.zlab_config(hidden_size=48, head_dim=16), {}, "the two must share an embedding"),
        (
            plain.zlab_config(),
            {"hidden_dim_adapter.proj.weight": plain.numbers(4, 4)},
            "hidden_dim_adapter.* unexpected",
        ),
        (plain.deepspec_config(markov_head_type="lstm"), plain.markov_tensors(), "a lstm Markov head"),
        (plain.deepspec_config(), {}, r"tensor markov_head.markov_w1.weight \[37, 6\] is missing"),
        (
            plain.block_speculators_config("dspark", speculators_config=None, markov_rank=plain.MARKOV_RANK),
            plain.reduced_tensors() | plain.markov_tensors(draft_vocab=plain.DRAFT_VOCAB),
            "does not say whether its first row predicts",
        ),
        (plain.zlab_config(quantization_config={"quant_method": "fp8"}), {}, "quantised"),
    ],
)
def test_what_would_surprise_is_refused_by_name(
    config: dict[str, Any], tensors: plain.Tensors, message: str, target: TargetWeights, tmp_path: Path
) -> None:
    folder = plain.write(tmp_path, config, plain.block_tensors() | tensors)
    with pytest.raises(CheckpointRefused, match=message):
        load_block(folder, target, torch.float32)


def test_a_pickled_mask_embedding_is_never_loaded(target: TargetWeights, tmp_path: Path) -> None:
    folder = plain.write(tmp_path, plain.zlab_config(), plain.block_tensors())
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointRefused, match=r"mask_embedding\.pt"):
        load_block(folder, target, torch.float32)
