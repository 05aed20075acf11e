"""MTP layers and EAGLE heads with latent attention cache their latents, and compute the published equations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.drafting.checkpoints.eagle3 import load_eagle3
from outrider.drafting.checkpoints.mtp import load_mtp
from outrider.drafting.checkpoints.target_weights import load_target_weights
from outrider.drafting.paged.paged_head import PagedHead
from outrider.engine.attention.batch import SessionRows
from outrider.engine.attention.ops import resolve_attention_ops
from tests.drafting.checkpoints import plain_writer as plain
from tests.drafting.mtp_targets import HIDDEN, save_mtp_target

TOKENS = [3, 36, 0, 5, 5, 9, 17]
_LATENT, _ROTATED = 16, 8


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_in_pieces_it_computes_the_published_equations(family: str, tmp_path: Path) -> None:
    target = save_mtp_target(family, tmp_path)
    ops = resolve_attention_ops("cpu", torch.device("cpu"))
    head = PagedHead(load_mtp(target.folder, torch.float32), ops, torch.float32, kv_cache_bytes=2**14, block_size=4)
    assert head.blocks.num_blocks == 2**14 // (4 * (_LATENT + _ROTATED) * 4)
    features = torch.randn((len(TOKENS), HIDDEN), generator=torch.Generator().manual_seed(0))
    found = torch.cat(
        [
            head.forward([SessionRows(TOKENS[first:end], first, [5, 2], end - first)], features[first:end])
            for first, end in ((0, 3), (3, 4), (4, 7))
        ]
    )
    torch.testing.assert_close(found, target.equations(TOKENS, features), atol=2e-5, rtol=0)


def test_an_eagle3_head_in_pieces_computes_what_it_does_at_once(tmp_path: Path) -> None:
    """That is compared with the equations in tests/drafting/checkpoints/test_load_eagle3.py."""
    plain.write(tmp_path / "target", plain.llama_config(), plain.target_tensors())
    target = load_target_weights(tmp_path / "target", torch.float32)
    config = plain.eagle3_config(**plain.latent_sizes(), architectures=["Eagle3DeepseekV2ForCausalLM"])
    folder = plain.write(tmp_path / "head", config, plain.with_latents(plain.eagle3_tensors()))
    whole = load_eagle3(folder, target, torch.float32, attn_implementation="eager")
    ops = resolve_attention_ops("cpu", torch.device("cpu"))
    served = load_eagle3(folder, target, torch.float32)
    head = PagedHead(served, ops, torch.float32, kv_cache_bytes=2**14, block_size=4)
    assert head.blocks.num_blocks == 2**14 // (4 * (plain.LATENT + plain.ROTATED) * 4)
    features = plain.numbers(len(TOKENS), plain.HIDDEN, seed=4)
    found = torch.cat(
        [
            head.forward([SessionRows(TOKENS[first:end], first, [5, 2], end - first)], features[first:end])
            for first, end in ((0, 3), (3, 4), (4, 7))
        ]
    )
    with torch.no_grad():
        wanted = whole(torch.tensor([TOKENS]), features[None], torch.arange(len(TOKENS))[None])[0]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
