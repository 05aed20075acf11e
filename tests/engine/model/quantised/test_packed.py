"""Weights of each packed format that stay packed: certified, and as near to the exact logits as bfloat16 weights are.

Oracle of the logits: transformers in float32 on the weights that were meant.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from batches import CachedSequence, run_step
from packed_writers import CASES, write_model
from safetensors.torch import load_file, save_file
from tiny_models import SERVED, save_tiny_model

from outrider.engine.certificate import certify
from outrider.engine.errors import ModelRefused
from outrider.engine.model.coded_weights import RowInvariantCodes, code_kinds
from outrider.engine.model.load import load_model
from outrider.engine.model.row_invariant_modules import RowInvariantLinear
from outrider.engine.run.runner import ModelRunner
from outrider.kernels.linear import cpu_code_panels
from outrider.kernels.linear.int8 import cpu_lines

pytestmark = pytest.mark.skipif(not cpu_code_panels.supports(torch.bfloat16), reason="no bf16 panels here")
_WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32}
_LENGTH = 60
# those whose groups are scattered differently in q, k and v, which are then dequantised and joined
_SCATTERED = {"gptq-4-v2-act-order", "ct-w4a16-act-order"}
_KINDS = {
    "gptq-4-v1": "i4",
    "gptq-4-v2-act-order": "i4",
    "gptq-8-v1-old-file": "i8",
    "gptq-3-v1": "i4",
    "awq": "i4",
    "ct-w4a16": "i4",
    "ct-w4a16-zeros": "i4",
    "ct-w4a16-act-order": "i4",
    "ct-w8a8": "i8",
    "ct-nvfp4": "i4",
    "ct-mxfp4": "i4",
    "ct-mxfp8": "e4m3",
    "fp8-block": "e4m3",
    "fp8-tensor": "e4m3",
    "modelopt-nvfp4": "i4",
}


def packed_model(folder: Path, name: str) -> Path:
    config, arguments = SERVED["llama"]
    plain = save_tiny_model(config, {**arguments, **_WIDTHS}, folder / "plain")
    write_model(plain, CASES[name], folder / "packed", folder / "meant")
    return folder / "packed"


@pytest.mark.parametrize("name", _KINDS)
def test_a_packed_model_is_certified_and_near_the_exact_logits(tmp_path: Path, name: str) -> None:
    loaded = load_model(str(packed_model(tmp_path, name)), dtype="bfloat16", packed_arithmetic="bf16")
    assert code_kinds(loaded.model) == [_KINDS[name]]
    linears = [part for part in loaded.model.model.modules() if isinstance(part, RowInvariantLinear)]
    assert name in _SCATTERED or all(isinstance(part, RowInvariantCodes) for part in linears)
    assert loaded.lean is not None
    assert loaded.lean.is_whole
    runner = ModelRunner(loaded, loaded.make_cache(4, 16))
    certificate = certify(loaded, runner)
    assert certificate.holds, certificate.describe()
    token_ids = torch.randint(3, 97, (_LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = run_step(runner, [CachedSequence(token_ids, [0, 1, 2, 3]).rows(_LENGTH)])[0].float()
    meant = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "meant", attn_implementation="eager").eval()
    with torch.inference_mode():
        exact = meant(torch.tensor([token_ids]), use_cache=False).logits[0]
        rounded = copy.deepcopy(meant).bfloat16()(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    ours, theirs = ((found - exact).square().mean().sqrt() for found in (logits, rounded))
    assert ours <= 1.2 * theirs


def test_a_damaged_weight_is_refused_by_name_though_it_is_read_late(tmp_path: Path) -> None:
    packed = packed_model(tmp_path, "gptq-4-v1")
    file = packed / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.scales"][0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(ModelRefused, match=r"layers\.1\.mlp\.up_proj\.weight: it has values that are not finite"):
        load_model(str(packed), dtype="bfloat16")


@pytest.mark.skipif(cpu_lines.instruction() is None, reason="this CPU has no AVX2")
def test_with_vnni_alone_fp8_is_dequantised_in_the_embedding_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_code_panels, "supports", lambda _dtype: False)
    config, arguments = SERVED["llama_tied"]
    plain = save_tiny_model(config, {**arguments, **_WIDTHS}, tmp_path / "plain")
    weights = r"(_proj|embed_tokens)\.weight$"
    write_model(plain, CASES["fp8-block"], tmp_path / "packed", tmp_path / "meant", weights)
    loaded = load_model(str(tmp_path / "packed"), dtype="bfloat16")
    assert code_kinds(loaded.model) == []
    meant = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "meant")
    wanted = meant.get_input_embeddings().weight.bfloat16()
    assert torch.equal(loaded.model.get_input_embeddings().weight, wanted)
    certificate = certify(loaded, ModelRunner(loaded, loaded.make_cache(2, 16)))
    assert certificate.holds, certificate.describe()
