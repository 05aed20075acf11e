"""The row-invariance certificate on a GPU, forward by forward and as CUDA graphs: of the demo target, the demo hybrid,
and random models with DeepSeek-V3's latents and with packed weights. In the interpreter: the tests of each backend.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from outrider.engine.certificate import certify
from outrider.engine.model.coded_weights import code_kinds
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from tests.engine.model.quantised.packed_writers import CASES, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU"),
]
MODELS = Path(__file__).parents[2] / "models"
DTYPES = ("bfloat16", "float32")
# DeepSeek-V3's latents, rotated parts and heads; the rest is small.
LATENT_HEADS = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 512,
}
# Qwen3-8B's heads and groups; the rest is small.
PACKED = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
}


def require_certificates(loaded: LoadedModel) -> None:
    for graphs in (False, True):
        runner = ModelRunner(loaded, loaded.make_cache(64), loaded.make_states(1), graphs=graphs)
        certificate = certify(loaded, runner)
        assert certificate.holds, f"{'CUDA graphs' if graphs else 'eager'}: {certificate.describe()}"


def saved(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["demo-target", "demo-hybrid"])
def test_the_demo_family(name: str, dtype: str) -> None:
    require_certificates(load_model(str(MODELS / name), dtype=dtype, device="cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_attention(tmp_path: Path, dtype: str) -> None:
    folder = saved(transformers.MiniCPM3Config(**LATENT_HEADS), tmp_path)
    loaded = load_model(str(folder), dtype=dtype, device="cuda")
    assert all(shape.values_in_keys for shape in loaded.layer_shapes), "latents are cached"
    require_certificates(loaded)


@pytest.mark.parametrize("case", ["gptq-4-v1", "ct-nvfp4", "ct-w8a8", "fp8-block"])
def test_packed_weights(tmp_path: Path, case: str) -> None:
    plain = saved(transformers.Qwen3Config(**PACKED), tmp_path / "plain")
    write_model(plain, CASES[case], tmp_path / "packed", tmp_path / "meant")
    loaded = load_model(str(tmp_path / "packed"), dtype="bfloat16", device="cuda")
    assert len(code_kinds(loaded.model)) == 1, "the weights stay packed"
    require_certificates(loaded)
