"""What is exported loads as the same head, bit for bit, and has the names that other servers read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from outrider.drafting.checkpoints.block import load_block
from outrider.drafting.checkpoints.eagle import load_eagle
from outrider.drafting.checkpoints.eagle3 import load_eagle3
from outrider.drafting.checkpoints.export import (
    export_block,
    export_eagle,
    export_eagle3,
    export_medusa,
    export_mlp_speculator,
)
from outrider.drafting.checkpoints.medusa import load_medusa
from outrider.drafting.checkpoints.mlp_speculator import load_mlp_speculator
from outrider.drafting.checkpoints.recognise import recognise
from outrider.drafting.checkpoints.target_weights import TargetWeights
from outrider.drafting.heads.errors import HeadConfigError
from outrider.drafting.heads.medusa import MedusaConfig, MedusaHeads
from outrider.engine.model.row_invariance import make_row_invariant
from tests.drafting.heads import small_heads
from tests.drafting.heads.small_heads import HIDDEN, VOCAB, random

TOKENS, POSITIONS = torch.tensor([[1, 5, 100, 7]]), torch.tensor([[4, 5, 6, 7]])


@pytest.fixture(scope="module")
def small_target() -> TargetWeights:
    """The target that small_heads are made for."""
    return TargetWeights(
        path="small target",
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_layers=6,
        read_embedding=lambda: random(VOCAB, HIDDEN, seed=1),
        read_lm_head=lambda: random(VOCAB, HIDDEN, seed=2) / 6,
        lm_head_extra=None,
        tokenizer_size=None,
    )


def eagle_run(head: Any) -> torch.Tensor:
    hidden = random(1, TOKENS.shape[1], HIDDEN * len(head.feature_layers), seed=9)
    return head.logits(head(TOKENS, head.fuse(hidden), POSITIONS))  # type: ignore[no-any-return]


def mlp_run(head: Any) -> torch.Tensor:
    state = head.start(random(4, HIDDEN, seed=9))
    state, first = head.step(state, TOKENS[0], 0)
    return torch.cat((first, head.step(state, TOKENS[0], 1)[1]))


def medusa_run(heads: Any) -> torch.Tensor:
    return heads(random(4, HIDDEN, seed=9))  # type: ignore[no-any-return]


def load_eager(load: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: load(*arguments, attn_implementation="eager")


def to_eagle3(head: Any, folder: Path) -> None:
    export_eagle3(head, folder, target="small target", target_architecture="LlamaForCausalLM")


def to_medusa(heads: Any, folder: Path) -> None:
    export_medusa(heads, folder, target="small target")


def to_block(head: Any, folder: Path) -> None:
    export_block(head, folder, target="small target", target_architecture="LlamaForCausalLM")


def block_run(head: Any) -> torch.Tensor:
    context = head.fuse(random(1, 3, HIDDEN * len(head.feature_layers), seed=9))
    positions = torch.tensor([[3, 4, 5, 6, 0, 1, 2]])
    outputs = head(TOKENS, context, positions, lambda _is_causal: {"attention_mask": torch.zeros(1, 1, 7, 7)})[0]
    return head.biased(head.lm_head(outputs), outputs, TOKENS[0])[0]  # type: ignore[no-any-return]


def mapped_medusa() -> MedusaHeads:
    config = MedusaConfig(HIDDEN, VOCAB, num_heads=2, head_vocab_size=9, has_bias=False)
    return small_heads.randomised(MedusaHeads(config, token_map=3 * torch.arange(9)))  # type: ignore[no-any-return]


# name -> (head, export, load, run, kind)
HEADS: dict[str, tuple[Callable[[], Any], Callable[..., None], Callable[..., Any], Callable[..., Any], str]] = {
    "medusa": (small_heads.medusa_heads, to_medusa, load_medusa, medusa_run, "medusa"),
    "medusa, one output head": (
        lambda: small_heads.medusa_heads(shares_lm_head=True),
        to_medusa,
        load_medusa,
        medusa_run,
        "medusa",
    ),
    "medusa, reduced vocabulary": (mapped_medusa, to_medusa, load_medusa, medusa_run, "medusa"),
    "mlp": (small_heads.mlp_speculator, export_mlp_speculator, load_mlp_speculator, mlp_run, "mlp_speculator"),
    "mlp, tied": (
        lambda: small_heads.mlp_speculator(tie_weights=True),
        export_mlp_speculator,
        load_mlp_speculator,
        mlp_run,
        "mlp_speculator",
    ),
    "eagle": (small_heads.eagle_head, export_eagle, load_eager(load_eagle), eagle_run, "eagle"),
    "eagle, biases, llama3 RoPE": (
        lambda: small_heads.eagle_head(
            num_layers=2,
            qkv_bias=True,
            o_bias=True,
            mlp_bias=True,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        export_eagle,
        load_eager(load_eagle),
        eagle_run,
        "eagle",
    ),
    "eagle3": (small_heads.eagle3_head, to_eagle3, load_eager(load_eagle3), eagle_run, "eagle3"),
    "eagle3, all settings": (
        lambda: small_heads.eagle3_head(
            num_layers=2, norm_before_residual=True, fc_norm=True, norm_output=True, fc_bias=True, has_embedding=True
        ),
        to_eagle3,
        load_eager(load_eagle3),
        eagle_run,
        "eagle3",
    ),
    "eagle3, qwen3, norm before fc": (
        lambda: small_heads.eagle3_head(model_type="qwen3", norm_before_fc=True),
        to_eagle3,
        load_eager(load_eagle3),
        eagle_run,
        "eagle3",
    ),
    "dspark": (small_heads.block_head, to_block, load_eager(load_block), block_run, "dspark"),
    "dspark, gated, two layers": (
        lambda: small_heads.block_head(num_layers=2, markov_kind="gated", causal=(False, False)),
        to_block,
        load_eager(load_block),
        block_run,
        "dspark",
    ),
    "dflash, the target's output head": (
        lambda: small_heads.block_head(
            draft_vocab_size=0, has_lm_head=False, markov_rank=0, predicts_from_anchor=False, causal=(False,)
        ),
        to_block,
        load_eager(load_block),
        block_run,
        "dflash",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_what_was_exported_loads_as_the_same_head(
    name: str, dtype: torch.dtype, small_target: TargetWeights, tmp_path: Path
) -> None:
    make, export, load, run, kind = HEADS[name]
    head = make().to(dtype)
    export(head, tmp_path)
    assert recognise(tmp_path) == kind
    loaded = load(tmp_path, small_target, dtype)
    mine, theirs = head.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    if kind != "mlp_speculator" and dtype == torch.float32:
        assert loaded.config == head.config
    if dtype == torch.float32:
        assert torch.equal(run(loaded), run(head))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as handle:
        return set(handle.keys())


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())  # type: ignore[no-any-return]


LAYER = {
    *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "layers.0.post_attention_layernorm.weight",
}


def test_eagle3_is_written_in_the_speculators_format(tmp_path: Path) -> None:
    to_eagle3(small_heads.eagle3_head(), tmp_path)
    norms = {"layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight", "norm.weight"}
    assert names(tmp_path) == {*LAYER, *norms, "fc.weight", "lm_head.weight", "embed_tokens.weight", "d2t", "t2d"}
    config = config_of(tmp_path)
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["speculators_config"]["verifier"]["name_or_path"] == "small target"
    assert config["transformer_layer_config"]["vocab_size"] == VOCAB
    with safe_open(tmp_path / "model.safetensors", framework="pt") as handle:
        offsets, knows = handle.get_tensor("d2t"), handle.get_tensor("t2d")
    assert offsets.dtype == torch.int64
    assert knows.nonzero()[:, 0].tolist() == (torch.arange(len(offsets)) + offsets).tolist()


def test_the_targets_embedding_can_be_left_out(small_target: TargetWeights, tmp_path: Path) -> None:
    head = small_heads.eagle_head()
    export_eagle(head, tmp_path, with_embedding=False)
    assert names(tmp_path) == {*LAYER, "fc.weight", "fc.bias"}
    loaded = load_eagle(tmp_path, small_target, torch.float32, attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(eagle_run(loaded), eagle_run(head))


def test_another_target_than_the_heads_own_is_noticed(small_target: TargetWeights, tmp_path: Path) -> None:
    """The exported embedding is not that of this target: it stays the head's own."""
    export_eagle(small_heads.eagle_head(), tmp_path)
    other = replace(small_target, read_embedding=lambda: random(VOCAB, HIDDEN, seed=99))
    head = load_eagle(tmp_path, other, torch.float32)
    assert torch.equal(head.state_dict()["embed_tokens.weight"], small_target.embedding)


def test_a_shared_output_head_of_medusa_is_written(tmp_path: Path) -> None:
    to_medusa(small_heads.medusa_heads(shares_lm_head=True), tmp_path)
    assert "lm_head.weight" in names(tmp_path)
    assert config_of(tmp_path)["original_lm_head"] is True


def test_floats_can_be_written_in_another_dtype(small_target: TargetWeights, tmp_path: Path) -> None:
    head = small_heads.medusa_heads()
    export_medusa(head, tmp_path, target="small target", dtype=torch.bfloat16)
    loaded = load_medusa(tmp_path, small_target, torch.bfloat16)
    assert all(torch.equal(found.bfloat16(), loaded.state_dict()[key]) for key, found in head.state_dict().items())
    assert config_of(tmp_path)["dtype"] == "bfloat16"


def test_a_head_without_plain_weights_is_not_written(tmp_path: Path) -> None:
    head = small_heads.medusa_heads()
    make_row_invariant(head)
    with pytest.raises(HeadConfigError, match="no plain weights"):
        to_medusa(head, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_of_a_trainer_is_replaced_whole(small_target: TargetWeights, tmp_path: Path) -> None:
    """Exporting again over an export leaves the second one, and no partial files."""
    to_medusa(small_heads.medusa_heads(), tmp_path)
    second = small_heads.randomised(small_heads.medusa_heads(), 55)
    to_medusa(second, tmp_path)
    loaded = load_medusa(tmp_path, small_target, torch.float32)
    assert all(torch.equal(found, loaded.state_dict()[key]) for key, found in second.state_dict().items())
    assert len(list(tmp_path.iterdir())) == 2
