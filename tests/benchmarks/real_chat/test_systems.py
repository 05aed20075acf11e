"""The weights that a peer gets which reads no GGUF, against gguf-py's own decoder."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real_chat.systems import save_dequantised
from tests.engine.model.gguf.gguf_writer import VOCABULARY, write_gguf
from tests.engine.tiny_models import SERVED, save_tiny_model


def test_a_peer_gets_the_files_own_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, arguments = SERVED["qwen2"]
    arguments = {**arguments, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32}
    changes = {"vocab_size": len(VOCABULARY), "use_sliding_window": False, "layer_types": None}
    plain = save_tiny_model(config, {**arguments, **changes}, tmp_path / "plain")
    file = write_gguf(plain, tmp_path / "model.gguf", "qwen2", "Q8_0")
    save_dequantised(str(file), tmp_path / "dequantised")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "dequantised", dtype="auto")
    assert found.dtype == torch.bfloat16
    assert not hasattr(found.config, "quantization_config")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}["blk.0.ffn_down.weight"]
    expected = torch.from_numpy(np.array(gguf.dequantize(stored.data, stored.tensor_type))).bfloat16()
    assert torch.equal(found.model.layers[0].mlp.down_proj.weight, expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "dequantised")("A").input_ids
