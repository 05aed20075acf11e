"""Medusa folders in every layout: what is loaded computes the published equation on the tensors of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.drafting.checkpoints.medusa import load_medusa
from outrider.drafting.checkpoints.recognise import recognise
from outrider.drafting.checkpoints.target_weights import TargetWeights
from tests.drafting.checkpoints import plain_writer as plain
from tests.drafting.heads import plain_math

HEADS, LAYERS = 3, 2
HIDDEN = plain.numbers(5, plain.HIDDEN, seed=900)
TGI = {"medusa_num_heads": HEADS, "medusa_num_layers": LAYERS, "base_model_name_or_path": "target"}

# name -> (config, tensors, file, has_bias)
LAYOUTS: dict[str, tuple[dict[str, Any], plain.Tensors, str, bool]] = {
    "vllm": (
        plain.medusa_config(HEADS, LAYERS),
        plain.medusa_vllm_tensors(HEADS, LAYERS),
        "model.safetensors",
        False,
    ),
    "vllm with bias and prefix": (
        plain.medusa_config(HEADS, LAYERS, medusa_fc_bias=True, truncated_vocab_size=plain.VOCAB),
        plain.medusa_vllm_tensors(HEADS, LAYERS, has_bias=True, prefix="medusa_heads."),
        "model.safetensors",
        True,
    ),
    "vllm, counts under medusa's names": (
        {"architectures": ["MedusaModel"], **TGI, "hidden_size": plain.HIDDEN},
        plain.medusa_vllm_tensors(HEADS, LAYERS),
        "model.safetensors",
        False,
    ),
    "original": (TGI, plain.medusa_original_tensors(HEADS, LAYERS), "medusa_lm_head.safetensors", True),
    "modelopt": (
        plain.llama_config(medusa_num_heads=HEADS, medusa_num_layers=LAYERS),
        plain.target_tensors() | plain.medusa_original_tensors(HEADS, LAYERS, prefix="medusa_heads."),
        "model.safetensors",
        True,
    ),
}


def expected(lm_heads: list[torch.Tensor], *, has_bias: bool) -> torch.Tensor:
    blocks = []
    for head in range(HEADS):
        pairs = [plain.medusa_block(head, layer) for layer in range(LAYERS)]
        blocks.append([(weight.double(), bias.double() if has_bias else None) for weight, bias in pairs])
    return plain_math.medusa(blocks, [weight.double() for weight in lm_heads], HIDDEN.double())


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_the_published_heads(layout: str, target: TargetWeights, tmp_path: Path) -> None:
    config, tensors, file, has_bias = LAYOUTS[layout]
    folder = plain.write(tmp_path, config, tensors, file)
    assert recognise(folder) == "medusa"
    heads = load_medusa(folder, target, torch.float32)
    assert not heads.training
    own_heads = [plain.medusa_lm_head(head) for head in range(HEADS)]
    assert_close(heads(HIDDEN), expected(own_heads, has_bias=has_bias))


class ResBlock(torch.nn.Module):
    """The original's, whose file is torch.save of its modules' state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(plain.HIDDEN, plain.HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.silu(self.linear(x))


def test_the_originals_own_file_is_read(target: TargetWeights, tmp_path: Path) -> None:
    torch.manual_seed(1)
    modules = torch.nn.ModuleList(
        torch.nn.Sequential(
            *(ResBlock() for _ in range(LAYERS)), torch.nn.Linear(plain.HIDDEN, plain.VOCAB, bias=False)
        )
        for _ in range(HEADS)
    )
    plain.write(tmp_path, TGI, {})
    (tmp_path / "model.safetensors").unlink()
    torch.save(modules.state_dict(), tmp_path / "medusa_lm_head.pt")
    assert recognise(tmp_path) == "medusa"
    with torch.no_grad():
        found = load_medusa(tmp_path, target, torch.float32)(HIDDEN)
        wanted = torch.stack([module(HIDDEN) for module in modules], dim=found.ndim - 2)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_shards_are_read_like_a_single_file(target: TargetWeights, tmp_path: Path) -> None:
    folder = plain.write_sharded(tmp_path, plain.medusa_config(HEADS, LAYERS), plain.medusa_vllm_tensors(HEADS, LAYERS))
    own_heads = [plain.medusa_lm_head(head) for head in range(HEADS)]
    assert_close(load_medusa(folder, target, torch.float32)(HIDDEN), expected(own_heads, has_bias=False))


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight", None])
def test_one_output_head_for_all(name: str | None, target: TargetWeights, tmp_path: Path) -> None:
    """original_lm_head: the checkpoint's copy, under either name, or the target's if there is none."""
    tensors = plain.medusa_vllm_tensors(HEADS, LAYERS)
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith("lm_heads")}
    shared = plain.target_tensors()["lm_head.weight"]
    if name is not None:
        shared = tensors[name] = plain.medusa_lm_head(7)
    folder = plain.write(tmp_path, plain.medusa_config(HEADS, LAYERS, original_lm_head=True), tensors)
    heads = load_medusa(folder, target, torch.float32)
    assert_close(heads(HIDDEN), expected([shared] * HEADS, has_bias=False))
    assert all(name.startswith("blocks.") for name in heads.state_dict())


@pytest.mark.parametrize("rows", [plain.VOCAB, 9])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_reduced_vocabulary_keeps_the_rows_of_the_token_map(
    rows: int, is_shared: bool, target: TargetWeights, tmp_path: Path
) -> None:
    """Output heads may be stored whole (rows are picked) or reduced already (taken as they are)."""
    token_map = torch.tensor([36, 0, 5, 7, 11, 13, 17, 19, 23])
    tensors = plain.medusa_vllm_tensors(HEADS, LAYERS, rows=rows) | {"token_map": token_map}
    changes: dict[str, Any] = {"truncated_vocab_size": 9}
    stored = [plain.medusa_lm_head(head, rows) for head in range(HEADS)]
    if is_shared:
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(("lm_heads.1", "lm_heads.2"))}
        changes["original_lm_head"] = True
        stored = [stored[0]] * HEADS
    folder = plain.write(tmp_path, plain.medusa_config(HEADS, LAYERS, **changes), tensors)
    heads = load_medusa(folder, target, torch.float32)
    picked = [weight[token_map] if rows == plain.VOCAB else weight for weight in stored]
    assert_close(heads(HIDDEN), expected(picked, has_bias=False))
    assert heads.token_map is not None
    assert heads.token_map.tolist() == token_map.tolist()


def test_the_dtype_asked_for_is_what_is_loaded(target: TargetWeights, tmp_path: Path) -> None:
    folder = plain.write(tmp_path, plain.medusa_config(HEADS, LAYERS), plain.medusa_vllm_tensors(HEADS, LAYERS))
    heads = load_medusa(folder, target, torch.bfloat16)
    assert {tensor.dtype for tensor in heads.state_dict().values()} == {torch.bfloat16}
    assert torch.equal(heads.blocks[0].layers[0].weight, plain.medusa_block(0, 0)[0].bfloat16())
