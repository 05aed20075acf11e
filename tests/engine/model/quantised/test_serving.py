"""A quantised model as it is served: its dtype, its certificate, and a draft model of packed weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from packed_writers import CASES, write_gpt_oss, write_model
from tiny_models import HYBRIDS, SERVED, save_tiny_model

from outrider.drafting.checkpoints.recognise import recognise
from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.certificate import certify
from outrider.engine.errors import ModelRefused
from outrider.engine.model.load import load_model
from outrider.engine.recurrent.rows import StateRows
from outrider.engine.run.runner import ModelRunner

_WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
_HYBRID_WIDTHS = {"linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_value_heads": 4}
_MOE = {**_WIDTHS, "moe_intermediate_size": 32, "num_local_experts": 4, "intermediate_size": 32}


def packed_model(folder: Path, architecture: str, case: str) -> Path:
    config, arguments = SERVED[architecture]
    widths = _WIDTHS if architecture == "llama" else _MOE
    plain = save_tiny_model(config, {**arguments, **widths}, folder / "plain")
    config_file = plain / "config.json"  # what most GPTQ and AWQ checkpoints say
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"dtype": "float16"}))
    if architecture == "gpt_oss":
        write_gpt_oss(plain, folder / "packed", folder / "meant")
    else:
        write_model(plain, CASES[case], folder / "packed", folder / "meant")
    return folder / "packed"


@pytest.mark.parametrize(
    ("architecture", "case"), [("llama", "ct-w4a16"), ("qwen3_moe", "fp8-block"), ("gpt_oss", "mxfp4")]
)
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_certificate_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, architecture: str, case: str, dtype: str
) -> None:
    loaded = load_model(str(packed_model(tmp_path, architecture, case)), dtype=dtype)
    assert loaded.dtype == (torch.float32 if dtype == "float32" else torch.bfloat16)
    assert f"computed in {'float32' if dtype == 'float32' else 'bfloat16'}" in caplog.text
    certificate = certify(loaded, ModelRunner(loaded, loaded.make_cache(2, 16)))
    assert certificate.holds, certificate.describe()


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_a_hybrid_is_served_from_packed_weights(tmp_path: Path, name: str) -> None:
    """With the numbers that they stand for; the projections into its recurrent layers are joined, so dequantised."""
    config, arguments = HYBRIDS[name]
    plain = save_tiny_model(config, {**arguments, **_WIDTHS, **_HYBRID_WIDTHS}, tmp_path / "plain")
    write_model(plain, CASES["ct-w4a16"], tmp_path / "packed", tmp_path / "meant")
    logits = []
    for folder, dtype in (("packed", "bfloat16"), ("meant", "bfloat16"), ("meant", "float32")):
        loaded = load_model(str(tmp_path / folder), dtype=dtype)
        runner = ModelRunner(loaded, loaded.make_cache(2), loaded.make_states(1))
        rows = SessionRows(list(range(3, 20)), 0, [0, 1], 17, state=StateRows(None, (), 0, 17))
        logits.append(runner.forward(build_batch([rows], 16)).logits)
    packed_error, meant_error = ((each - logits[2]).abs().mean() for each in logits[:2])
    assert packed_error < 1.5 * meant_error


def test_a_weight_is_rounded_once(tmp_path: Path) -> None:
    packed = packed_model(tmp_path, "llama", "fp8-block")
    found = load_model(str(packed), row_invariant=False).model.state_dict()
    meant = load_model(str(tmp_path / "meant"), dtype="float32", row_invariant=False).model.state_dict()
    for name, weight in meant.items():
        assert torch.equal(found[name], weight.bfloat16()), name


def test_a_packed_draft_model_is_recognised(tmp_path: Path) -> None:
    assert recognise(packed_model(tmp_path, "llama", "ct-w4a16")) == "draft_model"


def test_linears_that_are_stored_transposed_are_refused(tmp_path: Path) -> None:
    config, arguments = SERVED["gpt2"]
    plain = save_tiny_model(config, {**arguments, "n_embd": 64, "n_inner": 96}, tmp_path / "plain")
    write_model(plain, CASES["ct-w8a8"], tmp_path / "packed", tmp_path / "meant", linear=r"mlp\.c_(fc|proj)\.weight$")
    with pytest.raises(ModelRefused, match="Conv1D"):
        load_model(str(tmp_path / "packed"))
