"""A widened Llama computes the same function, judged by transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.widen import Widths, widen_folder


def test_a_widened_llama_has_the_same_logits(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=36,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=6,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "small")
    widen_folder(tmp_path / "small", tmp_path / "wide", Widths(64, 16, 4, 90, 6), torch.device("cpu"))
    wide = LlamaForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32).eval()
    token_ids = torch.randint(97, (2, 40))
    with torch.no_grad():
        assert (wide(token_ids).logits - model(token_ids).logits).abs().max() < 1e-4
    assert wide.model.layers[0].self_attn.q_proj.weight.shape == (96, 64)
